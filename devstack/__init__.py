"""What a laptop needs in place of a fleet: private servers, a model server and sinks that misbehave on command.

Not part of the wheel; nothing in `inference_worker` imports it. Everything listens on 127.0.0.1, lives in temporary
folders and ends with the process that started it.
"""
