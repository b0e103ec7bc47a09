"""inference_worker: the daemon that sits beside a model server and answers requests from RabbitMQ."""

__version__ = "0.1.0"
