"""Publishes a retry copy and does not wait for its confirm (law 1)."""

import sys
import threading

from inference_worker import __main__
from inference_worker.amqp_connection import close_connection
from inference_worker.message_publisher import MessagePublisher, _copy_properties


def _publish(self, exchange, routing_key, delivery, headers):
    connection = self._connect()
    properties = _copy_properties(delivery, headers)
    connection.channel().basic_publish(exchange, routing_key, delivery.body, properties, mandatory=True)
    # closing would wait for the broker
    threading.Thread(target=close_connection, args=(connection,), daemon=True).start()


MessagePublisher._publish = _publish
sys.exit(__main__.main([]))
