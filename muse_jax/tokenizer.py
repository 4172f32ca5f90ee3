"""Text <-> token ids, with Hugging Face's `tokenizers` library."""

import os

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
BYTE_SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")  # ids 256, 257, 258


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in the ByteLevel alphabet (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids 0..255 are the bytes of the text's UTF-8, and 256.. are `BYTE_SPECIAL_TOKENS`.

    `encode(text).ids` then `decode(ids, skip_special_tokens=False)` gives the text back, whatever it is. A special
    token's name inside the text becomes that token.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # pyright sees these attributes as read-only
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_SPECIAL_TOKENS])
    return tokenizer


def load_tokenizer(folder: "str | os.PathLike[str]") -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: there is no tokenizer.json, or it cannot be parsed.
    """
    path = as_path("folder", folder) / TOKENIZER_FILE
    headline = f"cannot load the tokenizer of {folder}"
    try:
        if path.is_fifo():
            raise OSError("a pipe, which may never end")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "copy the model's tokenizer.json there, or pass token ids instead of text"
        raise CheckpointError(headline, [f"{TOKENIZER_FILE}: {error.strerror or error}; {hint}"]) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(headline, [f"{TOKENIZER_FILE}: not UTF-8 text; download the file again"]) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for every parse error
        raise CheckpointError(
            headline, [f"{TOKENIZER_FILE}: not a tokenizer ({error}); download the file again"]
        ) from error
