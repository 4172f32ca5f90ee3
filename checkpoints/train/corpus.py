"""The text that a trained pair learns from, and its tokenizer: the Python standard library's own sources.

    python checkpoints/train/corpus.py OUT [--vocabulary 4096]

Everyone who has Python has them, under the PSF licence; OUT/data.json says which version. OUT gets tokenizer.json and
the token ids of both splits, `train.npy` and `held_out.npy`: uint16 [N], each file's text between `<bos>` and `<eos>`.
A file's split follows from the SHA-256 of its bytes, so it never changes sides, and no text is in both.
"""

import argparse
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")  # ids 0, 1, 2
HELD_OUT = 20
"""One file in so many is held out."""
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
"""Other people's code lies below the standard library; it has other licences."""


def sources(folder: Path) -> list[Path]:
    """All *.py files of a standard library in a fixed order, without installed packages."""
    files = folder.rglob("*.py")
    return sorted(file for file in files if not _EXCLUDED & set(file.relative_to(folder).parts))


def is_held_out(content: bytes) -> bool:
    """Which split a file belongs to, by its content alone: copies of a file stay together."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT == 0


def split(files: list[Path]) -> tuple[list[str], list[str]]:
    """(texts to train on, texts held out); each content once, files that are not UTF-8 passed over."""
    splits: tuple[list[str], list[str]] = ([], [])
    seen: set[bytes] = set()
    for file in files:
        content = file.read_bytes()
        if content in seen:
            continue
        seen.add(content)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # a few tests of other encodings
            continue
        if text.strip():
            splits[is_held_out(content)].append(text)
    return splits


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of exactly so many entries: any text is encoded without loss.

    Raises:
        ValueError: more entries than uint16 ids have, than the texts have pieces for, or too few for all bytes.
    """
    if vocabulary > 1 << 16:
        raise ValueError(f"vocabulary: given {vocabulary}, allowed: at most {1 << 16}, because ids are uint16")
    tokenizer = Tokenizer(models.BPE())
    # pyright sees these attributes as read-only
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise ValueError(
            f"vocabulary: given {vocabulary}, these texts give {size} entries; allowed: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens at least, and what the texts have pieces for at most"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 [N]: all texts, each between `<bos>` and `<eos>`."""
    begin, end = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS[:2])
    # A special token's name inside a text is text like any other.
    tokenizer.encode_special_tokens = True
    ids = [[begin, *encoding.ids, end] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate([np.array(row, np.uint16) for row in ids])


def make(out: Path, folder: Path, vocabulary: int) -> dict[str, object]:
    """Writes all files into a new folder; what data.json says.

    Raises:
        ValueError: no files for one of the splits, or a vocabulary that `train_tokenizer` refuses.
        FileExistsError: the folder exists.
    """
    if out.exists():
        raise FileExistsError(f"{out}: exists; give the name of a folder to create")
    files = sources(folder)
    train, held_out = split(files)
    if not train or not held_out:
        raise ValueError(f"{folder}: {len(files)} files give {len(train)} and {len(held_out)} texts, needed: 1 of each")
    tokenizer = train_tokenizer(train, vocabulary)
    arrays = {"train": encode(tokenizer, train), "held_out": encode(tokenizer, held_out)}
    about: dict[str, object] = {
        "source": f"{platform.python_implementation()} {platform.python_version()}, standard library",
        "licence": "PSF-2.0",
        "vocabulary": vocabulary,
    }
    out.mkdir(parents=True)
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(out / "tokenizer.json"))
    for (name, ids), texts in zip(arrays.items(), (train, held_out), strict=True):
        np.save(out / f"{name}.npy", ids)
        size = sum(len(text.encode()) for text in texts)
        about[name] = {"files": len(texts), "bytes": size, "tokens": len(ids), "bytes_per_token": size / len(ids)}
    (out / "data.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def main() -> None:
    """Makes the data of the Python that runs this."""
    parser = argparse.ArgumentParser(description="Tokenizer and token ids of the Python standard library's sources.")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--vocabulary", type=int, default=4096)
    args = parser.parse_args()
    print(json.dumps(make(args.out, Path(sysconfig.get_paths()["stdlib"]), args.vocabulary), indent=1))


if __name__ == "__main__":
    main()
