"""What ``trtllm-replayssm validate`` runs on a machine: tiny models of every family, and checks of their engines.

``catalogue`` lists the models, ``models`` makes their checkpoints, ``subject`` builds and runs the engines, ``checks`` says
what must hold, ``report`` runs it all. Checks know sessions and engine folders only, so that they are the same for every
engine flavour. Nothing outside this package and ``cli/validate`` may import it.
"""
