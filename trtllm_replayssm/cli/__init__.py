"""The command ``trtllm-replayssm``: one module per subcommand, with ``add_arguments(parser)`` and ``run(args)``.

``main`` parses, calls ``run`` and turns exceptions into exit codes. Modules here import heavy packages (torch,
transformers) inside ``run``, so that ``--help`` answers at once. They hold no logic of their own.
"""
