"""Tests on a real RabbitMQ and a real Redis, with the worker as a real process.

A package, so that its modules may bear the names of unit tests.
"""
