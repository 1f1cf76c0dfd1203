"""The model classes that ``trtllm-build`` of tensorrt-llm 1.1 and 1.2 takes (``--model_cls_file``, ``--model_cls_name``).

``model_cls`` holds and registers them, ``config`` reads a checkpoint's config.json as TensorRT-LLM does, ``emission`` puts the
network backend on TensorRT-LLM's own network, attention and collectives. Nothing outside this package may import it, and
nothing here but ``available`` can be imported without tensorrt-llm.
"""
