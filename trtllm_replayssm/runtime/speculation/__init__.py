"""Speculative decoding: drafters propose tokens, one step of the model verifies them, and what is rejected is forgotten.

Every drafter has the interface in ``drafter``; ``verification`` decides what stays, so that drafts change how many steps a
text takes, never its distribution. Nothing here owns a request or a slot: the scheduler does.
"""
