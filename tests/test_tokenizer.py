"""The byte tokenizer gives every text back; broken tokenizer files are refused with a reason."""

from hypothesis import example, given
from hypothesis import strategies as st

from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError
from muse_jax.tokenizer import byte_tokenizer, load_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)


@given(TEXT)
@example("")
@example(" leading,  double \t\n and trailing ")
@example("\x00\x7f\u2028 日本語 🎉 e\u0301 <bos><eos")
def test_round_trip(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    if "<" not in text:
        assert ids == list(text.encode())
        assert TOKENIZER.decode(ids) == text


@given(TEXT)
def test_special_tokens_inside_text(text):
    ids = TOKENIZER.encode(f"{text}<eos>{text}").ids
    assert 257 in ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"{text}<eos>{text}"


def test_ids_are_those_of_the_tiny_configuration():
    config = MuseSparkConfig.tiny()
    assert TOKENIZER.token_to_id("<bos>") == config.bos_token_id
    assert (TOKENIZER.token_to_id("<eos>"),) == config.eos_token_ids
    assert TOKENIZER.token_to_id("<pad>") == config.pad_token_id
    assert TOKENIZER.get_vocab_size() == 259 <= config.vocab_size


def test_every_byte_has_its_own_id():
    assert [len(TOKENIZER.decode([byte])) for byte in range(128)] == [1] * 128
    # bytes that are not UTF-8 on their own decode to the replacement character, and do not raise
    assert TOKENIZER.decode([0xFF, 0x41]) == "\ufffdA"


def test_save_and_load(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("Grüße <eos>").ids == TOKENIZER.encode("Grüße <eos>").ids


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_files_never_crash(tmp_path_factory, position, flip):
    folder = tmp_path_factory.mktemp("tokenizer")
    data = bytearray(TOKENIZER.to_str().encode())
    data[position % len(data)] ^= flip
    (folder / "tokenizer.json").write_bytes(data)
    try:
        load_tokenizer(folder).encode("text")
    except CheckpointError as error:
        assert error.problems
