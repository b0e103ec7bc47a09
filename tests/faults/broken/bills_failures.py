"""Bills a request that failed, for the tokens that the model might have used."""

import sys

from inference_worker import __main__
from inference_worker.message_processor import MessageProcessor
from inference_worker.messages import Failed
from inference_worker.model_answer import Usage

_whole = MessageProcessor._settlement


def _settlement(self, attempt, outcome, decision):
    if isinstance(attempt.written, Failed):
        attempt.usage = Usage(10, 10)
        self._bill(attempt)
    return _whole(self, attempt, outcome, decision)


MessageProcessor._settlement = _settlement
sys.exit(__main__.main([]))
