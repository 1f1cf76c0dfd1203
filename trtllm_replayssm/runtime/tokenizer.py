"""Text to token ids and back, from the tokenizer.json that travels in the engine folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from trtllm_replayssm.errors import UserError

#: What a decoder writes for bytes that are not (yet) a whole character.
REPLACEMENT = "\ufffd"


def check_unicode(text: str, what: str) -> None:
    """Raises UserError when the text holds halves of a character, as Python makes them of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} is not Unicode text: character {error.start + 1} is {text[error.start]!a}",
            "it must be UTF-8, and \\ud800 to \\udfff in JSON must come in pairs",
        ) from None


class Tokenizer:
    """Encodes prompts and decodes outputs."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError when the folder has no tokenizer.json, or a broken one."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{folder} has no tokenizer.json, so it cannot read or write text",
                'give the prompt as token ids: rows {"input_ids": [...]} of --input_file, or lists of ints in Python',
            )
        try:
            self.fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} cannot be read: {error}", "convert and build again") from None
        # A tokenizer.json may ask for padding or truncation; a prompt must come through as it is.
        self.fast.no_padding()
        self.fast.no_truncation()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises UserError for text that is not Unicode."""
        check_unicode(text, "the prompt")
        return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)


class TextStream:
    """The text of a growing list of tokens, piece by piece.

    A token may end in the middle of a character, so replacement characters at the end are held back until the next tokens
    show what they are. A decoder may also treat the first token of a text in its own way (leading blanks), so a piece is
    what a short window of tokens gained, not what its last token decodes to.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.tokens: list[int] = []
        #: The window starts at this token, and its first ``emitted`` characters are out.
        self.start = self.emitted = 0
        #: Where the next window starts: the text up to this token ended in a whole character.
        self.boundary = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self.tokens.append(token)
        text = self.decoded()
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self.emitted :]
        self.emitted += len(piece)
        if piece and len(certain) == len(text):
            self.start, self.boundary = self.boundary, len(self.tokens)
            self.emitted = len(self.decoded())
        return piece

    def finish(self) -> str:
        """What was held back: bytes that never became a character, as replacement characters."""
        return self.decoded()[self.emitted :]

    def decoded(self) -> str:
        return self.tokenizer.decode(self.tokens[self.start :], self.skip_special_tokens)
