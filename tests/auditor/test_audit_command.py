"""`qknorm audit`, files of weights, SARIF, and the assertion for tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES
from mutants import HEALTHY, MUTANTS
from qknorm.auditor import audit
from qknorm.auditor.sarif import LEVELS, to_sarif
from qknorm.auditor.testing import assert_qk_norm
from qknorm.auditor.weights import audit_weights
from qknorm.cli import main

MUTANT = next(m for m in MUTANTS if m.name == "fused-v_normed")


def run(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qknorm", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A Python module with factories, in a folder of its own."""
    here = Path(__file__).parent
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "from mutants import HEALTHY, MUTANTS\n"
        "def faulty():\n"
        "    m = next(m for m in MUTANTS if m.name == 'fused-v_normed')\n"
        "    return m.build(), m.inputs()\n"
        "def sound():\n"
        "    m = HEALTHY[0]\n"
        "    return m.build(), m.inputs()\n"
        "def nothing():\n"
        "    import torch\n"
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
        "def text():\n"
        "    return 'no module'\n"
    )
    return tmp_path


def test_a_factory_is_audited_and_the_exit_code_says_so(module: Path) -> None:
    faulty = run("mine:faulty", folder=module)
    assert faulty.returncode == 1, faulty.stderr
    first, second, *_ = faulty.stdout.splitlines()
    assert first.startswith("mine:faulty: failed, ")
    assert second.startswith("QK003 warning")
    assert "blocks.0.attention and 1 more" in second
    sound = run("mine:sound", folder=module)
    assert sound.returncode == 0, sound.stdout
    assert "mine:sound: passed, " in sound.stdout
    declared = run("mine:faulty", "--suppress", "QK003=wanted", folder=module)
    assert declared.returncode == 0
    assert "QK003 suppressed: wanted" in declared.stdout
    assert run("mine:faulty", "--fail-on", "error", folder=module).returncode == 0


def test_json_and_sarif(module: Path) -> None:
    ended = run("mine:faulty", "--json", "--sarif", "found.sarif", folder=module)
    found = json.loads(ended.stdout)
    assert not found["passed"]
    one = found["findings"][0]
    assert {"code", "severity", "layer", "evidence"} <= one.keys()
    assert (one["code"], one["layer"]) == ("QK003", "blocks.0.attention")
    assert found["formulas"]["blocks.0.attention"]["v_norm"] is True
    sarif = json.loads((module / "found.sarif").read_text())
    assert sarif["version"] == "2.1.0"
    results = sarif["runs"][0]["results"]
    rules = sarif["runs"][0]["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in results)
    assert {r["level"] for r in results} <= set(LEVELS.values())


def test_sarif_keeps_what_was_suppressed_with_its_reason() -> None:
    report = audit(MUTANT.build(), MUTANT.inputs(), suppress={"QK003": "wanted"})
    results = to_sarif(report, "mine", "0")["runs"][0]["results"]
    reasons = [r["suppressions"][0]["justification"] for r in results if "suppressions" in r]
    assert reasons == ["wanted", "wanted"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["nowhere.at:all"],
        ["mine:absent"],
        ["mine:text"],
        ["mine:nothing"],
        ["mine.py"],
        ["mine:sound", "--fail-on", "never"],
        ["mine:sound", "--suppress", "QK003"],
    ],
)
def test_what_cannot_be_audited_is_one_sentence_and_exit_code_2(
    module: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(module)
    monkeypatch.setattr(sys, "argv", ["qknorm", "audit", *arguments])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    sys.modules.pop("mine", None)
    out, err = capfd.readouterr()
    assert ended.value.code == 2, out
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: ")


def test_a_checkpoint_with_and_without_its_weights(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["qwen3"]
    model = architecture.make()
    architecture.randomise_(model, 3)
    model.save_pretrained(tmp_path)
    ended = run(tmp_path, "--json")
    found = json.loads(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    low, high = next(iter(found["formulas"].values()))["q_gain_range"]
    assert 0.4 < low < 0.8 < 1.2 < high < 1.6
    structure = json.loads(run(tmp_path, "--json", "--no-weights").stdout)
    assert next(iter(structure["formulas"].values()))["q_gain_range"] == pytest.approx([1.0, 1.0])


# Files of weights ---------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, path)
    return path


def qwen3_like(layers: int = 2, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {}
    for i in range(layers):
        attention = f"model.layers.{i}.self_attn"
        made[f"{attention}.q_proj.weight"] = torch.randn(64, 32)
        made[f"{attention}.k_proj.weight"] = torch.randn(32, 32)
        made[f"{attention}.q_norm.weight"] = torch.rand(16) + 0.5
        made[f"{attention}.k_norm.weight"] = torch.rand(16) + 0.5
        made[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(32)
    return made | changed


def test_weights_alone(tmp_path: Path) -> None:
    sound = audit_weights(write(tmp_path / "a.safetensors", qwen3_like()))
    assert not sound.codes
    assert sound.not_probed
    tensors = qwen3_like()
    tensors["model.layers.1.self_attn.k_norm.weight"] = torch.ones(16)
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    found = audit_weights(write(tmp_path / "b.safetensors", tensors))
    assert {(one.code, one.layer) for one in found.findings} == {
        ("QK020", "model.layers.1"),
        ("QK016", "model.layers.0"),
    }
    bare = {name: t for name, t in qwen3_like().items() if "_norm" not in name or "input" in name}
    assert {one.code for one in audit_weights(write(tmp_path / "c.safetensors", bare)).findings} == {
        "QK001"
    }
    full = qwen3_like()
    for i in range(2):
        full[f"model.layers.{i}.self_attn.q_norm.weight"] = torch.rand(64) + 0.5
        full[f"model.layers.{i}.self_attn.k_norm.weight"] = torch.rand(32) + 0.5
    assert audit_weights(write(tmp_path / "d.safetensors", full)).codes == {"QK004"}


def test_a_file_of_weights_by_the_command(tmp_path: Path) -> None:
    ended = run(write(tmp_path / "a.safetensors", qwen3_like()))
    assert ended.returncode == 0, ended.stderr
    assert "computes nothing" in ended.stdout


def test_findings_of_a_file_are_suppressed_like_those_of_a_model(tmp_path: Path) -> None:
    constant = {k: torch.ones_like(v) if "norm" in k else v for k, v in qwen3_like().items()}
    file = write(tmp_path / "a.safetensors", constant)
    assert audit_weights(file).codes == {"QK020"}
    ended = run(file, "--suppress", "QK020=not trained")
    assert ended.returncode == 0, ended.stderr
    assert "QK020 suppressed: not trained" in ended.stdout
    with pytest.raises(ValueError, match="QK999"):
        audit_weights(file, suppress={"QK999": "no such code"})


# In tests of users --------------------------------------------------------------------------------


def test_the_assertion_passes_a_sound_model_and_names_what_is_wrong() -> None:
    sound = HEALTHY[0]
    assert_qk_norm(sound.build(), sound.inputs())
    with pytest.raises(AssertionError, match=r"QK003 blocks\.0\.attention: V does not grow"):
        assert_qk_norm(MUTANT.build(), MUTANT.inputs())
    bare = next(m for m in HEALTHY if m.name == "fused-no_norm")
    with pytest.raises(AssertionError, match="q and k are not normed"):
        assert_qk_norm(bare.build(), bare.inputs())


# The page and the plug-in --------------------------------------------------------------------------


def test_the_page_holds_verdict_findings_layers_and_what_was_not_probed(module: Path) -> None:
    ended = run("mine:faulty", "--html", "found.html", "--suppress", "QK003=<wanted>", folder=module)
    assert ended.returncode == 0, ended.stderr
    page = (module / "found.html").read_text()
    assert '<h1 class="good">mine:faulty: passed, ' in page
    assert "Reason: &lt;wanted&gt;" in page  # what users write is escaped
    run("mine:faulty", "--html", "found.html", folder=module)
    page = (module / "found.html").read_text()
    assert '<h1 class="bad">mine:faulty: failed, ' in page
    assert "<b>QK003 warning</b>" in page
    assert "<li>blocks.1.attention" in page
    assert "interleaved" in page or "half" in page
    assert "http" not in page.split("</style>")[1], "the page is offline"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="looking at the page needs the program chromium")
def test_the_page_fits_a_phone(module: Path) -> None:
    run("mine:faulty", "--html", "found.html", folder=module)
    page = module / "found.html"
    probe = (
        "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    )
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    ended = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    width, inner = re.search(r"<title>(\d+) of (\d+)</title>", ended.stdout).groups()
    assert int(width) <= int(inner)


def test_the_plug_in_fails_a_test_with_what_is_wrong(tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "test_mine.py").write_text(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "def test_sound(assert_qk_norm):\n"
        "    from mutants import HEALTHY\n"
        "    m = HEALTHY[0]\n"
        "    assert_qk_norm(m.build(), m.inputs())\n"
        "def test_faulty(assert_qk_norm):\n"
        "    from mutants import MUTANTS\n"
        "    m = next(m for m in MUTANTS if m.name == 'fused-v_normed')\n"
        "    assert_qk_norm(m.build(), m.inputs())\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout
    assert "QK003 blocks.0.attention" in ended.stdout
    assert "auditor.py" not in ended.stdout, "the traceback ends where the user's test called"


def test_a_test_run_that_does_not_use_the_plug_in_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    disabled = [f"-pno:{name}" for name in ("lightning", "anyio", "hypothesispytest", "xdist")]
    ended = subprocess.run(
        [*command, *disabled], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout
