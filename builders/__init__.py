"""From a Hugging Face checkpoint to a TensorRT-LLM checkpoint, and the model definition that both describe.

``hf/`` reads Hugging Face folders, ``families/`` holds one short file per model family (config keys and tensor names),
``layers/`` the mixers, attention and MLP kinds that families share, ``model`` the decoder assembled from them. Nothing here
runs a model or knows an engine folder.
"""
