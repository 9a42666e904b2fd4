"""What the tests of the command line share: sizes, how a command ended, what it printed."""

import json
import re

TEXT = "".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400))
VERBS = ("train", "compare", "sample", "report", "env")
SIZE = ("--layers", 1, "--dim", 32, "--heads", 2, "--context", 16, "--batch", 4, "--warmup", 2)


class Ended:
    """How a command ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        def refuse(name):
            raise AssertionError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def words(text):
    """A text without the boxes and line breaks of a terminal."""
    return re.sub(r"[\s\u2500-\u257f]+", " ", text)


def complaint(ended, *parts):
    """The one sentence of a refusal."""
    assert ended.code == 2, ended.err or ended.out
    assert "Traceback" not in ended.err
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    assert len(lines[0]) > 15
    for part in parts:
        assert str(part) in lines[0]
    assert ended.out == ""
    return lines[0]


def final(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (line,) = (line for line in lines if line["kind"] == "final")
    return line


def copy_of(trained, tmp_path, data=None):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in trained.iterdir():
        if file.suffix in (".pt", ".json", ".jsonl"):
            (folder / file.name).write_bytes(file.read_bytes())
    if data is not None:
        (folder / "checkpoint.pt").write_bytes(data)
    return folder
