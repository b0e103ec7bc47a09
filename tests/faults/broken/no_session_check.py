"""Settles a delivery of an ended session in the next one, where its tag is another message's (law 3)."""

import dataclasses
import sys

from inference_worker import __main__
from inference_worker.rmq_listener import RmqListener

_whole = RmqListener.settle


def settle(self, settlement):
    if not self._session.ended:
        delivery = dataclasses.replace(settlement.delivery, session=self._session)
        settlement = dataclasses.replace(settlement, delivery=delivery)
        self._unsettled.add(delivery.tag)
    _whole(self, settlement)


RmqListener.settle = settle
sys.exit(__main__.main([]))
