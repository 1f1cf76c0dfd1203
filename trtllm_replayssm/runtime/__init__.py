"""The embedded engine: builds an engine folder from a checkpoint, loads it, and makes tokens with it.

``build`` and ``engine`` write and read the folder, ``session`` owns the state of the running requests, ``generation`` and
``llm`` turn prompts into text. Nothing here knows a model family, a Hugging Face checkpoint or the command line.
"""
