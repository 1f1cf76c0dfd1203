"""Hashed n-grams: constants as transformers draws them, and rows against plain integers of any size."""

from __future__ import annotations

import math

import pytest
import torch
from hf_models import build
from test_torch_ops import network

from trtllm_replayssm.network.ngram import NgramHash, primes_from

SPEC = NgramHash(size=3, heads=2, table_rows=50, vocab_size=20, seed=5, index=1, end_token=2)


@pytest.mark.parametrize("name", ["qwen4_exp_text", "qwen4_exp_vl"])
def test_constants_are_those_of_transformers(name: str) -> None:
    model = build(name)
    config = model.config.get_text_config()
    for index, number in enumerate(config.ple_layer_ids):
        theirs = model.base_model.get_submodule("language_model" if name.endswith("vl") else "")
        theirs = theirs.layers[number - 1].ple.ple_embedding
        spec = NgramHash(
            config.ngram_size,
            config.heads_per_ngram,
            config.ngram_vocab_size_base,
            config.vocab_size,
            config.seed,
            index,
            config.eos_token_id,
        )
        assert list(spec.multipliers) == theirs.layer_multipliers.tolist()
        assert list(spec.primes) == theirs.ngram_heads_vocab_sizes.tolist()
        assert list(spec.offsets) == theirs.ngram_heads_offsets.tolist()


def test_products_of_a_published_vocabulary_do_not_wrap() -> None:
    spec = NgramHash(size=3, heads=8, table_rows=20_000_000, vocab_size=248_320, seed=1234, index=0, end_token=248_044)
    assert max(spec.multipliers) * (spec.vocab_size - 1) < 2**63
    assert all(m % 2 for m in spec.multipliers)
    assert len(set(spec.primes)) == 16
    # As far as the density of primes there allows, tables are hardly larger than asked for.
    assert spec.table_rows <= min(spec.primes) < max(spec.primes) < spec.table_rows + 16 * 4 * math.log(spec.table_rows)


def test_primes() -> None:
    found = primes_from(0)
    assert [next(found) for _ in range(8)] == [2, 3, 5, 7, 11, 13, 17, 19]
    assert next(primes_from(97)) == 97


def rows_of(tokens: list[int]) -> list[int]:
    """Rows for the n-grams that end at the last token."""
    before = tokens[:-1]
    if SPEC.end_token in before:
        before = before[len(before) - before[::-1].index(SPEC.end_token) :]
    history = [tokens[-1], *before[::-1], SPEC.end_token, SPEC.end_token]
    products = [t * m for t, m in zip(history, SPEC.multipliers)]
    mixed = (products[0] ^ products[1], products[0] ^ products[1] ^ products[2])
    return [SPEC.offsets[h] + mixed[h // SPEC.heads] % SPEC.primes[h] for h in range(4)]


def test_rows_of_texts_in_steps() -> None:
    """Ends of texts at every place, rejected drafts, a padding row, a slot that held another text before."""
    text = [5, 2, 7, 19, 2, 2, 1, 3, 11, 2, 4, 6, 2, 8, 9, 10]
    cache, done = torch.full((2, 1, 24, 1), -1, dtype=torch.int32), 0
    for tokens, kept in ((1, 1), (2, 2), (4, 2), (4, 1), (1, 1), (6, 6), (4, 3)):
        ids = torch.zeros(2, tokens, dtype=torch.int32)
        ids[0] = torch.tensor((text[done : done + kept] + [13] * tokens)[:tokens])
        net = network([(0, done, tokens), (-1, 0, 0)])
        rows = net.ngram_ids(SPEC, ids, cache)
        assert rows.dtype == torch.int32
        assert rows.shape == (2, tokens, 4)
        for t in range(kept):
            assert rows[0, t].tolist() == rows_of(text[: done + t + 1])
        done += kept
    assert done == len(text)
    assert (cache[1] == -1).all()
    ids = torch.tensor([[9], [0]], dtype=torch.int32)
    assert network([(0, 0, 1), (-1, 0, 0)]).ngram_ids(SPEC, ids, cache)[0, 0].tolist() == rows_of([9])
