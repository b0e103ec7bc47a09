"""The worker against a real vLLM: `python -m tests.vllm` (make e2e-vllm). Outside CI: it takes 3 GB and ten minutes.

Each scenario publishes to a real RabbitMQ, has a real worker process ask a real vLLM, reads the results from a real
Redis, and compares them with what the same vLLM says when it is asked directly.
"""
