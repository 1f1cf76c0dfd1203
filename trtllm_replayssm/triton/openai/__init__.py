"""The HTTP interface of OpenAI, ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, before a Triton server.

A thin layer: ``protocol`` reads and checks requests, ``chat`` makes prompts of messages, ``backend`` asks the Triton server by
gRPC, ``answers`` and ``failures`` shape what comes back, ``app`` joins them. It holds no state of its own, and knows nothing of
the engine but its tokenizer and its limits.
"""
