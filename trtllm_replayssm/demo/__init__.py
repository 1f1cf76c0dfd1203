"""The demonstration: a small model through convert, build, generate, and proofs of what the engine claims.

``subject`` says which model, ``models`` makes or loads it with transformers, ``runs`` drives a session in different ways,
``proofs`` compares them. Nothing outside this package, ``validation`` and ``cli/demo`` may import it.
"""
