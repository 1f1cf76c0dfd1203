"""Kernels of other projects, loaded from their published packages while a benchmark runs.

``fetch`` brings the few files that are needed into a folder that git ignores; ``loader`` imports them without their
frameworks; the other modules call them, one class each. Nothing of another project is in this repository.
"""
