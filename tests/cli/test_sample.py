"""`qknorm sample`: the seed alone decides; the cache changes nothing."""

import pytest
import torch

from commands import SIZE, complaint, copy_of
from qknorm.lab import checkpoint
from qknorm.lab.data import Codec
from qknorm.lab.sample import generate, load_model


def sampled(qknorm, folder, *arguments):
    ended = qknorm("sample", folder, "--prompt", "12 green", *arguments, "--json")
    assert ended.code == 0, ended.err
    return ended.json["text"]


def test_sample_depends_on_the_seed_alone(qknorm, trained):
    first = sampled(qknorm, trained, "--tokens", 40, "--seed", 1)
    torch.rand(3)
    assert sampled(qknorm, trained, "--tokens", 40, "--seed", 1) == first
    assert sampled(qknorm, trained, "--tokens", 40, "--seed", 2) != first


def test_sample_goes_to_stdout_and_nothing_else_does(qknorm, trained):
    ended = qknorm("sample", trained, "--prompt", "12 green", "--tokens", 20, "--seed", 1)
    assert ended.out == sampled(qknorm, trained, "--tokens", 20, "--seed", 1) + "\n"


def uncached(folder, prompt, tokens, *, temperature, seed):
    """The definition: the whole text through the model for every token."""
    model, _ = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([ids]))[0, -1].double()
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                p = torch.softmax(logits.float() / temperature, dim=-1)
                ids.append(int(torch.multinomial(p, 1, generator=generator)))
    return Codec(None).decode(ids)


def test_temperature_zero_takes_the_likeliest_token_whatever_the_seed(qknorm, trained):
    greedy = sampled(qknorm, trained, "--tokens", 30, "--temperature", 0, "--seed", 1)
    assert greedy == sampled(qknorm, trained, "--tokens", 30, "--temperature", 0, "--seed", 2)
    assert greedy == uncached(trained, "12 green", 30, temperature=0, seed=0)


def test_sampling_through_the_cache_equals_sampling_without_it(qknorm, trained):
    # Past the context of training, so that positions must go on counting.
    text = sampled(qknorm, trained, "--tokens", 60, "--temperature", 0.7, "--seed", 5)
    assert text == uncached(trained, "12 green", 60, temperature=0.7, seed=5)


def test_a_lower_temperature_is_closer_to_greedy(trained):
    model, codec = load_model(trained)
    greedy = generate(model, codec, "12 green", tokens=20, temperature=0.0, seed=0)
    cold = generate(model, codec, "12 green", tokens=20, temperature=1e-4, seed=3)
    hot = generate(model, codec, "12 green", tokens=20, temperature=5.0, seed=3)
    assert cold == greedy
    assert hot != greedy


def test_a_prompt_beyond_ascii_survives(qknorm, trained):
    ended = qknorm("sample", trained, "--prompt", "na\u00efve \u4f60", "--tokens", 3, "--json")
    assert ended.json["text"].startswith("na\u00efve \u4f60")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prompt", ""], "prompt"),
        (["--tokens", 0], "tokens"),
        (["--tokens", -5], "tokens"),
        (["--temperature", -1], "temperature"),
        (["--temperature", "nan"], "temperature"),
    ],
    ids=lambda value: "=".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_request_that_means_nothing_is_one_sentence(qknorm, trained, arguments, word):
    complaint(qknorm("sample", trained, *arguments), word)


def test_a_prompt_outside_the_vocabulary_is_one_sentence(qknorm, tmp_path):
    dump = tmp_path / "t.bin"
    dump.write_bytes(bytes([1, 2, 3, 4] * 300))
    arguments = ["--data", dump, "--token-dtype", "uint8", "--vocab-size", 10, "--steps", 1]
    qknorm("train", tmp_path / "run", *SIZE, *arguments)
    complaint(qknorm("sample", tmp_path / "run", "--prompt", "a"), 97, 10)


def test_a_model_of_nan_is_one_sentence(qknorm, trained, tmp_path):
    state = checkpoint.load(trained / "checkpoint.pt")
    state["model"]["head.weight"].fill_(torch.nan)
    folder = copy_of(trained, tmp_path)
    torch.save(state, folder / "checkpoint.pt")  # we write none
    complaint(qknorm("sample", folder))
