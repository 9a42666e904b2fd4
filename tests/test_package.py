"""What `import qknorm` brings along, and what it offers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import requires, version

import pytest
import torch

import qknorm

HEAVY = ("typer", "rich", "plotly", "jinja2", "tokenizers", "tensorboard", "transformers", "pandas")


def test_import_qknorm_pulls_in_torch_and_nothing_heavier():
    code = f"import qknorm, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    before = f"import torch, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, before)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", qknorm.__all__)
def test_every_public_name_exists_and_has_a_docstring(name):
    assert (getattr(qknorm, name).__doc__ or "").strip()


def test_the_audit_is_a_function_and_its_package_has_another_name():
    from qknorm.auditor import Report
    from qknorm.auditor.auditor import audit

    assert qknorm.audit is audit
    assert importlib.import_module("qknorm.auditor.testing").assert_qk_norm  # F50
    layer = torch.nn.TransformerEncoderLayer(16, 2)
    assert isinstance(qknorm.audit(layer, torch.randn(5, 1, 16)), Report)


def test_torch_is_required_from_2_10_and_not_capped():
    (torch,) = [r for r in requires("qknorm") or [] if r.startswith("torch")]
    assert torch.replace(" ", "") == "torch>=2.10"


def test_the_installed_version_is_that_of_the_source():
    assert version("qknorm") == qknorm.__version__


def test_f11_a_second_copy_of_the_package_works_beside_the_first():
    code = """
import importlib, sys
import torch
import qknorm as first
import qknorm.monitor
import qknorm.nn
for name in [name for name in sys.modules if name.split(".")[0] == "qknorm"]:
    del sys.modules[name]
second = importlib.import_module("qknorm")
importlib.import_module("qknorm.monitor")
importlib.import_module("qknorm.nn")
assert second is not first
q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
for copy in (first, second):
    for backend in ("reference", "stock", "auto"):
        out, stats = copy.attention(q, k, v, stats=True, backend=backend)
        out.sum().backward()
    copy.logit_stats(q, k)

class Model(torch.nn.Module):
    def __init__(self, copy):
        super().__init__()
        self.own = copy.nn.Attention(copy.nn.AttentionConfig(dim=16, num_heads=2))

    def forward(self, x):
        q = self.own(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

for copy in (first, second):
    model = Model(copy)
    with copy.monitor.Monitor.attach(model, every=1) as monitor:
        model(torch.randn(1, 5, 16))
        layers = monitor.step()[0].layers
    assert sorted((name, layer.rows) for name, layer in layers.items()) == [("", 5), ("own", 5)]
assert torch.equal(first.attention(q, k, v), second.attention(q, k, v))
print("both work")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "both work\n", done.stderr
