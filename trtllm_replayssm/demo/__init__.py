"""The demonstration: a tiny random model through convert, build, generate, and proofs of what the engine claims.

``models`` makes the Hugging Face checkpoint with transformers, ``runs`` drives a session in different ways, ``proofs`` compares
them. Nothing outside this package, ``validation`` and ``cli/demo`` may import it.
"""
