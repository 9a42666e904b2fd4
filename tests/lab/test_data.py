"""Tokens from every kind of source, batches that depend on seed and step alone, and what is refused."""

import json

import pytest
import torch

from qknorm.lab import data
from qknorm.lab.data import Codec, DataConfig, Dataset

TEXT = "".join(f"Line {i} of a small text; nine = 9.\n" for i in range(200))
CONTEXT = 16


def load(source, *, vocab_size=256, context=CONTEXT, **options):
    return data.load(DataConfig(source=str(source), **options), vocab_size=vocab_size, context=context)


def all_tokens(dataset):
    return torch.cat([dataset.train.long(), dataset.holdout.long()])


def as_bytes(dataset):
    return bytes(all_tokens(dataset).tolist())


def write_bin(path, values, dtype):
    path.write_bytes(torch.tensor(values).to(dtype).view(torch.uint8).numpy().tobytes())
    return path


def refused(source, *words, **options):
    """The sentence in which a source is refused: one line that holds all of `words`."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        load(source, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence.strip()
    for word in words:
        assert str(word) in sentence
    return sentence


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tokenizer_file(tmp_path):
    """A tokenizer.json of whole words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "Line": 1, "of": 2, "a": 3, "small": 4, "text": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# Sources ---------------------------------------------------------------------------------------


def test_the_embedded_corpus_is_the_same_each_time_and_is_python_source():
    first, second = (load("stdlib", context=128) for _ in range(2))
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.holdout, second.holdout)
    # The demo sees 400 steps of 16 x 128 tokens: less text than that would be learned by heart.
    assert len(first.train) > 400 * 16 * 128
    text = as_bytes(first).decode(errors="replace")
    assert text.count("def ") > 1000
    assert text.count("\ufffd") < len(text) / 1000


def test_a_text_file_is_its_bytes(text_file):
    assert as_bytes(load(text_file)) == TEXT.encode()


def test_text_beyond_ascii_is_its_utf8_bytes(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("na\u00efve \u4f60\u597d " * 200, encoding="utf-8")
    assert as_bytes(load(path)) == path.read_bytes()


def test_a_folder_is_all_its_text_files_in_a_fixed_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    parts = {"b.txt": "bbbb" * 100, "a.txt": "aaaa" * 100, "sub/c.txt": "cccc" * 100}
    for name, text in parts.items():
        (folder / name).write_text(text)
    (folder / "ignored.md").write_text("zzzz" * 100)
    found = as_bytes(load(folder)).decode()
    for text in parts.values():
        assert text in found
    assert "z" not in found
    assert found.index("a") < found.index("b") < found.index("c")


def test_jsonl_is_the_text_of_each_line_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "t.jsonl"
    texts = [f"document {i} \u00e9" for i in range(60)]
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
    path.write_text("\n\n".join(lines) + "\n")
    found = as_bytes(load(path)).decode()
    position = -1
    for text in texts:
        position = found.index(text, position + 1)
    assert '"id"' not in found


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("uint8", [0, 1, 200, 255]),
        ("uint16", [0, 1, 32767, 32768, 65535]),
        ("int32", [0, 1, 65536, 1_000_000]),
    ],
)
def test_a_token_dump_keeps_every_value_of_its_type(tmp_path, dtype, values):
    values = values * 200
    path = write_bin(tmp_path / "t.bin", values, getattr(torch, dtype))
    dataset = load(path, vocab_size=max(values) + 1, token_dtype=dtype)
    inputs, targets = dataset.batch(0, 1, 16, CONTEXT)
    assert set(inputs.flatten().tolist()) | set(targets.flatten().tolist()) == set(values)
    assert inputs.dtype == torch.int64
    period = len(set(values))
    for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist():
        start = values.index(row[0])
        assert row == (values * 2)[start : start + CONTEXT + 1]
        assert period > 1
    held, _ = next(iter(dataset.holdout_batches(1, 2, CONTEXT)))
    assert set(held.flatten().tolist()) <= set(values)


def test_a_tokenizer_json_gives_its_ids_for_text_and_jsonl(tmp_path, text_file, tokenizer_file):
    from tokenizers import Tokenizer

    expected = Tokenizer.from_file(str(tokenizer_file)).encode(TEXT).ids
    dataset = load(text_file, vocab_size=6, tokenizer=str(tokenizer_file))
    assert all_tokens(dataset).tolist() == expected
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": TEXT}))
    assert all_tokens(load(path, vocab_size=6, tokenizer=str(tokenizer_file))).tolist() == expected
    config = DataConfig(source=str(text_file), tokenizer=str(tokenizer_file))
    assert data.vocabulary(config) == 6


def test_the_vocabulary_of_bytes_is_256_and_a_dump_does_not_say(text_file, tmp_path):
    assert data.vocabulary(DataConfig()) == 256
    assert data.vocabulary(DataConfig(source=str(text_file))) == 256
    assert data.vocabulary(DataConfig(source=str(tmp_path / "t.bin"))) is None


def test_a_codec_returns_the_text_it_was_given(tokenizer_file):
    text = "def f(\u00e9): pass"
    assert Codec(None).decode(Codec(None).encode(text)) == text
    assert max(Codec(None).encode(text)) < 256
    words = Codec(str(tokenizer_file))
    assert words.encode("a small text") == [3, 4, 5]
    assert words.decode([3, 4, 5]) == "a small text"


# Batches and the split ------------------------------------------------------------------------


@pytest.fixture
def counted():
    """Tokens that say where they stand."""
    return Dataset(train=torch.arange(1000, dtype=torch.int32), holdout=torch.arange(1000, 1100))


def test_a_batch_depends_on_seed_and_step_alone(counted):
    first = counted.batch(3, 7, 8, CONTEXT)
    torch.manual_seed(123)
    torch.rand(5)
    counted.batch(3, 8, 8, CONTEXT)
    again = counted.batch(3, 7, 8, CONTEXT)
    fresh = Dataset(train=counted.train.clone(), holdout=counted.holdout).batch(3, 7, 8, CONTEXT)
    for other in (again, fresh):
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def starts_of(dataset, seed, step):
    return tuple(dataset.batch(seed, step, 8, CONTEXT)[0][:, 0].tolist())


def test_batches_differ_by_step(counted):
    assert len({starts_of(counted, 0, step) for step in range(1, 26)}) == 25


def test_batches_differ_by_seed(counted):
    # A generator that keeps 32 bits of its seed would give every run seed the same batches.
    assert len({starts_of(counted, seed, 1) for seed in range(25)}) == 25


def test_batches_of_one_seed_are_not_those_of_another_some_steps_later(counted):
    runs = [[starts_of(counted, seed, step) for step in range(1, 30)] for seed in range(4)]
    assert len({start for run in runs for start in run}) == 4 * 29


def test_drawing_a_batch_leaves_the_global_generator_alone(counted):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    counted.batch(0, 1, 8, CONTEXT)
    assert torch.equal(before, torch.get_rng_state())


def test_targets_are_inputs_shifted_by_one(counted):
    inputs, targets = counted.batch(0, 1, 8, CONTEXT)
    assert inputs.shape == targets.shape == (8, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)  # since token t stands at place t
    held_inputs, held_targets = next(iter(counted.holdout_batches(1, 4, CONTEXT)))
    assert torch.equal(held_targets, held_inputs + 1)


def test_batches_reach_the_first_and_the_last_token_and_no_further():
    small = Dataset(train=torch.arange(20), holdout=torch.arange(20))
    seen = torch.cat([torch.stack(small.batch(0, step, 8, CONTEXT)) for step in range(1, 40)])
    assert seen.min() == 0
    assert seen.max() == 19


def test_training_batches_never_hold_held_out_tokens(tmp_path):
    values = list(range(1000))
    path = write_bin(tmp_path / "t.bin", values, torch.int32)
    dataset = load(path, vocab_size=1000, token_dtype="int32", holdout=0.1)
    train, holdout = set(dataset.train.tolist()), set(dataset.holdout.tolist())
    assert not train & holdout
    assert train | holdout == set(values)
    assert len(holdout) == 100
    trained = torch.cat([torch.stack(dataset.batch(0, step, 16, CONTEXT)) for step in range(1, 60)])
    assert not set(trained.flatten().tolist()) & holdout
    held = [x for pair in dataset.holdout_batches(4, 4, CONTEXT) for x in pair]
    assert set(torch.cat(held).flatten().tolist()) <= holdout


def test_held_out_batches_are_fixed_and_spread_over_all_held_out_tokens(counted):
    first, again = (list(counted.holdout_batches(3, 4, CONTEXT)) for _ in range(2))
    assert len(first) == 3
    for (a, b), (c, d) in zip(first, again, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    starts = torch.cat([inputs[:, 0] for inputs, _ in first])
    assert starts.min() == 1000
    assert max(int(targets.max()) for _, targets in first) == 1099


# Refusals --------------------------------------------------------------------------------------


def test_a_missing_path_is_refused(tmp_path):
    refused(tmp_path / "nowhere.txt", "nowhere.txt")
    refused(tmp_path / "nowhere", "nowhere")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.bin"])
def test_an_empty_file_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"")
    refused(path, name)


def test_jsonl_of_empty_texts_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": ""}\n')
    refused(path, "t.jsonl")


def test_a_folder_without_text_files_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text(TEXT)
    refused(tmp_path, tmp_path, ".txt")


@pytest.mark.parametrize(
    "line",
    ['{"body": "x"}', "{broken", '["text"]', '"text"', "17", '{"text": null}', '{"text": ["a"]}'],
    ids=["no-text", "broken", "list", "string", "number", "null", "nested"],
)
def test_a_jsonl_line_without_a_text_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "t.jsonl"
    good = json.dumps({"text": TEXT})
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    refused(path, "t.jsonl", "line 3")


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 1001), ("int32", 1002)])
def test_a_dump_whose_size_does_not_fit_its_type_is_refused(tmp_path, dtype, size):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(size))
    refused(path, size, token_dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "bad"), [("uint8", 100), ("uint16", 40_000), ("int32", 70_000), ("int32", -1)]
)
def test_a_token_out_of_range_is_refused_with_its_value(tmp_path, dtype, bad):
    path = write_bin(tmp_path / "t.bin", [1] * 500 + [bad] + [2] * 500, getattr(torch, dtype))
    refused(path, bad, vocab_size=100, token_dtype=dtype)


def test_the_largest_token_that_fits_is_accepted_and_the_next_refused(tmp_path):
    path = write_bin(tmp_path / "t.bin", [0, 99] * 500, torch.uint16)
    assert int(load(path, vocab_size=100).train.long().max()) == 99
    refused(path, 99, vocab_size=99)


def test_a_bad_token_in_the_held_out_tail_is_refused_too(tmp_path):
    path = write_bin(tmp_path / "t.bin", [1] * 1000 + [300], torch.uint16)
    refused(path, 300, vocab_size=256)


def test_a_context_longer_than_the_data_is_refused_and_the_longest_one_works(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(bytes(100))
    # Half and half: 50 tokens hold a window of 49 and the target after it.
    dataset = load(path, holdout=0.5, context=49)
    assert dataset.batch(0, 1, 2, 49)[0].shape == (2, 49)
    assert len(list(dataset.holdout_batches(1, 2, 49))) == 1
    refused(path, 50, "context", holdout=0.5, context=50)
    refused(path, "context", context=1000)


def test_held_out_text_too_short_for_the_context_is_refused(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(bytes(300))
    refused(path, "context", holdout=0.05, context=CONTEXT)


@pytest.mark.parametrize("name", ["t.parquet", "t", "t.TXT.gz"])
def test_an_unknown_suffix_is_refused(tmp_path, name):
    (tmp_path / name).write_text(TEXT)
    refused(tmp_path / name, name, ".txt", ".jsonl", ".bin")


def test_a_missing_tokenizer_is_refused(text_file, tmp_path):
    refused(text_file, "no.json", tokenizer=str(tmp_path / "no.json"))


def test_a_tokenizer_that_is_none_is_refused(text_file, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{not a tokenizer")
    refused(text_file, "tokenizer.json", tokenizer=str(path))


@pytest.mark.parametrize("options", [{"token_dtype": "int64"}, {"holdout": 0.0}, {"holdout": 1.0}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DataConfig(**options)


@pytest.mark.parametrize("size", [200, 2**24 + 5000])
def test_f16_held_out_windows_reach_from_the_first_token_to_the_last(size: int) -> None:
    holdout = (torch.arange(size) % 251).to(torch.uint8)
    dataset = Dataset(train=holdout[:200], holdout=holdout)
    batches = list(dataset.holdout_batches(2, 3, 16))
    assert torch.equal(batches[0][0][0], holdout[:16].long())
    assert torch.equal(batches[-1][1][-1], holdout[-16:].long())
    inputs = torch.cat([inputs for inputs, _ in batches])
    starts = torch.arange(6) * (size - 17) // 5
    assert torch.equal(inputs[:, 0], holdout[starts].long())
