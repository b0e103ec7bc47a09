"""A shim: everything is in setup.cfg."""

from setuptools import setup

setup()
