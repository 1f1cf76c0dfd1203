"""Engines of the flavour ``tensorrt``: plans instead of weights, and a runner that executes them.

``models`` says which plans an engine has and what is in them, ``plans`` builds them into the engine folder, ``record`` is what
config.json keeps of that, ``engine`` loads them, ``plan`` binds tensors to one of them, ``runner`` leads a session's steps
through them. Only these files and ``compat`` know TensorRT's runtime; the session, and all above it, do not.
"""
