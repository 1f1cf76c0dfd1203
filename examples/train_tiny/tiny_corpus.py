"""The text: the Python standard library's own source files, of the interpreter that runs.

A file is held out or trained on by the hash of its name, so that every machine with that Python splits alike. Test suites
are left out, because distributions of Python differ in whether they bring them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trtllm_replayssm.demo.catalogue import SPECIAL_TOKENS
from trtllm_replayssm.errors import UserError

#: Folders of the library's tree that are no source of it.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
#: One file in so many is held out.
HELD_OUT_IN = 20
END_OF_FILE = SPECIAL_TOKENS.index("</s>")


@dataclass(frozen=True)
class Corpus:
    """trained: token ids uint16 ``[n]`` of all files that are trained on, in a fixed random order, each with an end token.

    held_out: the text of the others, one behind the other. files: how many of each there are.
    """

    trained: np.ndarray
    held_out: str
    files: tuple[int, int]


def read_corpus(tokenizer: Tokenizer) -> Corpus:
    """Raises UserError where the interpreter has no source files."""
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, text in sorted(library_files()):
        texts[is_held_out(name)].append(text)
    if not texts[False] or not texts[True]:
        raise UserError(
            f"{library_folder()} has too few source files to train on", "run a Python with its standard library"
        )
    table = byte_tokens(tokenizer)
    pieces = [np.append(table[np.frombuffer(text, np.uint8)], END_OF_FILE) for text in texts[False]]
    order = np.random.default_rng(0).permutation(len(pieces))
    trained = np.concatenate([pieces[i] for i in order]).astype(np.uint16)
    return Corpus(trained, b"".join(texts[True]).decode(), (len(texts[False]), len(texts[True])))


def library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def library_files() -> Iterator[tuple[str, bytes]]:
    """Name below the library's folder, and content, of every source file in UTF-8."""
    folder = library_folder()
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if LEFT_OUT.isdisjoint(name.parts):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            if content and is_utf8(content):
                yield name.as_posix(), content


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_IN == 0


def byte_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Token id of every byte, as the byte-level tokenizer gives it; -1 for the bytes that no UTF-8 text has."""
    table = np.full(256, -1)
    # Every byte of UTF-8 is in one of these: all characters of up to two bytes, and a few for each longer first byte.
    for code in (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x400)):
        character = chr(code)
        table[np.frombuffer(character.encode(), np.uint8)] = tokenizer.encode(character).ids
    return table
