"""Triton Inference Server: model repositories, the Python model behind them, the server process, the OpenAI front.

``tensors`` says which tensors the model has; ``repository`` writes them into config.pbtxt, ``asks`` reads requests made of
them, ``replies`` writes responses. ``model`` runs inside Triton's python backend and joins these to the scheduler.
``installation`` and ``server`` run on the other side: they find a Triton server and keep it.
Nothing here computes tokens, and nothing outside imports Triton's modules.
"""

#: Environment variable with the name of a file, into which the model writes the id of its process when it is ready.
MODEL_FILE_VARIABLE = "TRTLLM_REPLAYSSM_MODEL_FILE"
