"""The report: one offline page that says what the numbers say."""

import base64
import html
import json
import re
import shutil
import signal
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from qknorm.lab import CompareConfig, DataConfig, ModelConfig, TrainConfig, compare, train
from qknorm.lab.report import words, write_report
from qknorm.lab.runs import find_runs, load_runs
from qknorm.lab.verdict import VERDICT_RULES
from runs import arm as get_run
from runs import final, strict_lines

# Tags that stand alone.
VOID = {"meta", "br", "link", "img", "input", "hr"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400)))
    return path


@pytest.fixture(scope="module")
def base(text):
    return TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=20,
        batch=2,
        context=16,
        warmup=2,
        eval_batches=2,
        stats_every=5,
    )


@pytest.fixture(scope="module")
def twins(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("twins") / "grid"
    compare(CompareConfig(base=base, lrs=(1e-2,)), folder)
    return folder


@pytest.fixture(scope="module")
def page(twins):
    return write_report(load_runs(find_runs([twins])), twins / "report.html").read_text()


class Page(HTMLParser):
    """What a reader sees, what a browser would fetch, and whether the tags close."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.words, self.fetched, self.open, self.tags = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)


def make(folder, base, **options):
    train(replace(base, **options), folder)
    return folder


def render(folders, path):
    return write_report(load_runs(find_runs(folders)), path).read_text()


def rewrite(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# The page ---------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_holds_its_own_plotly(page):
    seen = Page(page)
    assert [url for url in seen.fetched if not url.startswith(("#", "data:"))] == []
    assert "link" not in seen.tags
    style = "".join(re.findall(r"<style.*?</style>", page, re.S))
    assert "@import" not in style
    assert "url(" not in style
    from plotly.offline import get_plotlyjs

    (packed,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page, re.S)
    assert zlib.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert len(page) < 2_200_000, "F86: the whole library unpacked is 4.8 MB"


def test_the_verdict_stands_first_and_in_words(page, twins):
    seen = Page(page).text
    sentences = words(json.loads((twins / "summary.json").read_text()))
    assert sentences
    position = 0
    for sentence in sentences:
        position = seen.index(sentence, position)
    assert position < seen.index("held-out loss", seen.index("Runs"))


def test_the_table_holds_the_numbers_of_the_logs(page, twins):
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.S)
    runs = find_runs([twins])
    assert len(runs) == 2
    for run in runs:
        end = final(run)
        (row,) = [r for r in rows if f">{end['arm']}, lr 0.01, seed 0<" in r]
        cells = [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.S)]
        assert cells[1] == "20"
        assert cells[2] == f"{end['final_loss']:.4f}"
        assert cells[3] == f"{end['max_logit']:,.1f}"
        assert cells[4] == f"{end['entropy_nats']:.4f}"
        assert cells[5].startswith(end["verdict"])


def test_configuration_environment_and_rules_are_on_the_page(page, text):
    seen = Page(page).text
    for word in (str(text), "weight_decay", "stats_every", "seed", "model.layers", "model.norm"):
        assert word in seen
    for word in (torch.__version__, "processor", "python", VERDICT_RULES):
        assert word in seen


def test_no_value_is_missing_from_the_page(page):
    seen = Page(page).text
    for word in ("NaN", "nan ", "undefined", "None", "Infinity", "{{", "}}", "{%"):
        assert word not in seen
    for plot in figures_of(page).values():
        json.dumps(plot, allow_nan=False)


def figures_of(page):
    """The figures that the page hands to plotly, by element."""
    found = {}
    pattern = r"\{ const figure = (.*?); Plotly\.newPlot\(\"(.*?)\", figure\.data"
    for text, name in re.findall(pattern, page):

        def refuse(word):
            raise AssertionError(f"{word} is not JSON")

        found[name] = json.loads(text, parse_constant=refuse)
    return found


def test_there_are_curves_of_four_quantities_for_both_arms_and_heatmaps_of_each_run(page):
    plots = figures_of(page)
    for name in ("loss", "max-logit", "entropy", "grad-norm"):
        shown = {line["name"] for line in plots[name]["data"]}
        assert {"none, lr 0.01, seed 0", "qk, lr 0.01, seed 0"} <= shown, name
        assert all(len(line["x"]) == len(line["y"]) > 0 for line in plots[name]["data"])
    assert plots["max-logit"]["layout"]["yaxis"]["type"] == "log"
    assert any("bound" in line["name"] for line in plots["max-logit"]["data"])
    for kind, shape in (("heat", [2, 2]), ("time", [4] * 4)):  # layer x head; head x record
        heat = [plot for name, plot in plots.items() if name.startswith(kind)]
        assert len(heat) == 4
        for plot in heat:
            assert [len(row) for row in plot["data"][0]["z"]] == shape
    assert set(re.findall(r'<div id="(.*?)"', page)) == set(plots)


def test_the_curves_are_the_logged_values(page, twins):
    plots = figures_of(page)
    for run in find_runs([twins]):
        steps = strict_lines(run, "step")
        layers = [r["layers"].values() for r in strict_lines(run, "record") if r["phase"] == "train"]
        title = f"{final(run)['arm']}, lr 0.01, seed 0"
        expected = {
            "loss": [line["loss"] for line in steps],
            "grad-norm": [line["grad_norm"] for line in steps],
            "max-logit": [max(max(x["max_logit"]) for x in all_of) for all_of in layers],
            "entropy": [min(sum(x["entropy_nats"]) / 2 for x in all_of) for all_of in layers],
        }
        for name, values in expected.items():
            drawn = [line["y"] for line in plots[name]["data"] if line["name"] == title]
            assert any(line == pytest.approx(values, rel=1e-6) for line in drawn), name


def test_the_heatmaps_show_the_final_values_of_every_head(page, twins):
    plots = figures_of(page)
    texts = [p["data"][0]["text"] for p in plots.values() if p["data"][0]["type"] == "heatmap"]
    for run in find_runs([twins]):
        record = strict_lines(run, "record")[-1]
        assert record["phase"] == "eval"
        for key in ("max_logit", "entropy_nats"):
            rows = [layer[key] for layer in record["layers"].values()]
            assert [[f"{x:.2f}" for x in row] for row in rows] in texts, key


def test_a_table_has_what_the_record_says_of_each_layer(base, tmp_path):
    """Bound, gains, sink and RMS, of the last evaluation; a dash for what a layer has not."""
    runs = [make(tmp_path / name, get_run(base, name)) for name in ("qk+sink", "none", "softcap")]
    text = render(runs, tmp_path / "r.html")
    for run in runs:
        record = strict_lines(run, "record")[-1]
        for name, x in record["layers"].items():
            gains = " and ".join(f"{gain:.4g}" for gain in x["gain_max"] or [])
            means = [x[key] for key in ("entropy_nats", "entropy_ratio", "sink_mass", "first_mass")]
            means += [x["q_rms"], x["k_rms"]]
            cells = [
                name,
                f"{max(x['max_logit']):.4g}",
                "-" if x["bound"] is None else f"{x['bound']:.4g}",
                gains or "-",
                *("-" if values is None else f"{sum(values) / len(values):.4g}" for values in means),
            ]
            assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in text
    assert text.count("<td>50</td>") == 2  # the cap


def test_one_run_alone_makes_a_page(twins, tmp_path):
    run = find_runs([twins])[0]
    seen = Page(render([run], tmp_path / "r.html")).text
    assert f"{final(run)['final_loss']:.3f}" in seen
    assert len(figures_of((tmp_path / "r.html").read_text())) == 8


def test_a_run_that_has_not_ended_is_shown_as_such(base, twins, tmp_path):
    folder = tmp_path / "stopped"

    def stop(item):
        if isinstance(item, dict) and item.get("step") == 12:
            signal.raise_signal(signal.SIGTERM)

    train(replace(base, lr=2e-2), folder, on_item=stop)
    text = render([folder], tmp_path / "alone.html")
    seen = Page(text).text
    assert "not ended" in seen
    assert "No run has ended yet" in seen
    assert len(figures_of(text)) == 8
    both = Page(render([twins, folder], tmp_path / "both.html")).text
    assert "not ended" in both
    assert "finished" in both or "diverged" in both
    for page in (seen, both):
        assert "None" not in page
        assert "undefined" not in page


def test_a_run_that_diverged_to_nan_makes_a_page_without_nan(base, tmp_path):
    none = replace(base.model, norm=None)
    run = make(
        tmp_path / "nan", base, arm="none", model=none, lr=1e30, clip=None, warmup=0, schedule="constant"
    )
    assert final(run)["final_loss"] is None
    text = render([run], tmp_path / "r.html")
    seen = Page(text).text
    assert "diverged" in seen
    assert "not finite" in seen
    for word in ("NaN", "nan,", "nan ", "None", "Infinity"):
        assert word not in seen
    assert len(figures_of(text)) == 6


def test_a_run_without_statistics_on_the_way_makes_a_page(base, tmp_path):
    run = make(tmp_path / "blind", base, stats_every=0)
    text = render([run], tmp_path / "r.html")
    assert f"{final(run)['max_logit']:,.1f}" in Page(text).text
    assert "heat-0-max-logit" in figures_of(text)


def test_names_are_shown_as_they_are_and_never_run(twins, tmp_path):
    evil = '<script>alert("x")</script>&amp;</script><b>'
    faked = {"verdict": "diverged", "diverged": True, "reason": evil}
    runs = []
    for i, run in enumerate(find_runs([twins])):
        copy = tmp_path / f"<b>run & {i}<i>"
        shutil.copytree(run, copy)
        rewrite(copy / "config.json", lambda config: config.update(arm=evil))
        rewrite(copy / "environment.json", lambda found: found.update(processor=evil))
        lines = [
            line | (faked | {"arm": f"{evil}{i}"} if "arm" in line else {})
            for line in strict_lines(copy)
        ]
        (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(copy)
    text = render(runs, tmp_path / "r.html")
    seen = Page(text)
    assert seen.tags.count("script") == 2  # plotly and the figures
    assert "b" not in seen.tags
    assert "i" not in seen.tags
    for word in (evil, "<b>run & 0<i>", "<b>run & 1<i>"):
        assert word in seen.text
    # Plotly takes tags for markup, and shows entities as what they stand for.
    titles = [line["name"] for line in figures_of(text)["loss"]["data"]]
    assert any(evil in html.unescape(title) for title in titles)
    assert not any("<" in title for title in titles)


def test_runs_of_one_title_from_two_folders_can_be_told_apart(base, tmp_path):
    runs = [make(tmp_path / name, base, batch=batch) for name, batch in (("small", 2), ("large", 4))]
    text = render(runs, tmp_path / "r.html")
    names = [line["name"] for line in figures_of(text)["grad-norm"]["data"]]
    assert len(set(names)) == 2


def test_the_page_replaces_an_old_one_and_leaves_no_part(twins, tmp_path):
    path = tmp_path / "r.html"
    path.write_text("old")
    render([twins], path)
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


# Which runs -------------------------------------------------------------------------------------


def test_runs_are_found_in_a_comparison_and_by_themselves(twins):
    inside = find_runs([twins])
    assert len(inside) == 2
    assert find_runs(inside) == inside


def test_a_folder_without_runs_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=str(folder)):
            find_runs([folder])


@pytest.mark.parametrize("name", ["config.json", "environment.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "cut", "prose"])
def test_a_damaged_run_is_refused_in_one_line_that_names_the_file(twins, tmp_path, name, damage):
    copy = tmp_path / "copy"
    shutil.copytree(find_runs([twins])[0], copy)
    file = copy / name
    if damage == "missing":
        file.unlink()
    elif damage == "cut" and name != "metrics.jsonl":  # a log may be cut, see below
        file.write_text(file.read_text()[:40])
    else:
        file.write_text("this is\nnot JSON\nat all\n")
    with pytest.raises(ValueError, match=str(copy)) as error:
        load_runs([copy])
    assert "\n" not in str(error.value)


def test_a_log_cut_in_its_last_line_is_read_up_to_there(twins, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(find_runs([twins])[0], copy)
    log = copy / "metrics.jsonl"
    log.write_text(log.read_text().split('{"kind": "final"')[0] + '{"kind": "fin')
    (run,) = load_runs([copy])
    assert run.final is None
    assert len(run.steps) == 20


def test_a_run_of_no_step_is_refused(twins, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(find_runs([twins])[0], copy)
    (copy / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="copy"):
        load_runs([copy])


def test_no_runs_make_no_page(tmp_path):
    with pytest.raises(ValueError, match="no runs"):
        write_report([], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


# Words ------------------------------------------------------------------------------------------


def record(arm, *, loss=2.0, logit=20.0, entropy=1.0, lr=0.03, seed=0, reason=None):
    return {
        "arm": arm, "lr": lr, "seed": seed, "final_loss": loss, "max_logit": logit,
        "entropy_nats": entropy, "verdict": "finished" if reason is None else "diverged",
        "diverged": reason is not None, "reason": reason,
        "initial_loss": 5.5, "steps": 400,
    }  # fmt: skip


def said(*records):
    return " ".join(words(records))


def test_words_say_that_the_norm_was_better():
    text = said(
        record("none", loss=1.997, logit=2884.0, entropy=0.005),
        record("qk", loss=1.628, logit=20.0, entropy=0.99),
    )
    assert "0.369 nats below none" in text
    assert "144 times smaller (20.0 against 2,884.0)" in text
    assert "0.990 nats against 0.005" in text
    assert "0.03" in text
    assert "above" not in text
    assert "larger" not in text


def test_words_say_that_the_norm_was_worse():
    text = said(record("none", loss=1.836, logit=5.0), record("qk", loss=1.9, logit=50.0))
    assert "0.064 nats above none" in text
    assert "10 times larger (50.0 against 5.0)" in text
    assert "below" not in text
    assert "smaller" not in text


def test_words_say_that_nothing_differs():
    text = said(record("none", loss=2.001, logit=20.0), record("qk", loss=2.0, logit=21.0))
    for word in ("below", "above", "smaller", "larger"):
        assert word not in text
    assert "same order" in text
    assert "2.000" in text


@pytest.mark.parametrize("ratio", [1.5, 2.5, 9.6, 12.5])
def test_a_stated_ratio_is_the_ratio_of_the_stated_numbers(ratio):
    for base, arm, word in ((10 * ratio, 10.0, "smaller"), (10.0, 10 * ratio, "larger")):
        text = said(record("none", logit=base), record("qk", logit=arm))
        found = re.search(rf"([\d.,]+) times {word}", text)
        if found:
            assert float(found[1].replace(",", "")) == pytest.approx(ratio, rel=0.1)
        else:
            assert ratio < 2


def test_words_follow_the_names_and_not_the_order_of_the_runs():
    pair = record("none", loss=2.0), record("qk", loss=1.0)
    assert words(pair) == words(pair[::-1])


def test_without_a_run_without_norm_the_first_arm_is_what_others_are_held_against():
    text = said(record("qk", loss=2.0), record("qk-shared", loss=1.5))
    assert "qk-shared ended 0.500 nats below qk" in text


def test_words_speak_of_each_rate_and_each_arm():
    records = [
        record(arm, lr=lr, loss=loss)
        for lr, losses in ((1e-3, (1.8, 1.9, 1.7)), (1e-1, (3.0, 1.5, 3.1)))
        for arm, loss in zip(("none", "qk", "softcap"), losses, strict=True)
    ]
    text = words(records)
    assert len(text) == 4
    assert "0.100 nats above none" in text[0]
    assert "0.100 nats below none" in text[1]
    assert "1.500 nats below none" in text[2]
    assert "0.100 nats above none" in text[3]


def test_words_over_seeds_are_means_and_say_so():
    records = [
        record(arm, seed=s, loss=x + s) for arm, x in (("none", 2.0), ("qk", 1.0)) for s in (0, 1)
    ]
    text = said(*records)
    assert "1.000 nats below none" in text
    assert "1.500 against 2.500" in text
    assert "2 seeds" in text
    assert "seeds" not in said(*records[::2])


def test_runs_are_paired_by_seed_when_one_has_no_number():
    """A mean over seed 1 alone must not be held against a mean over seeds 0 and 1."""
    text = said(
        record("none", seed=0, loss=None, logit=None, entropy=None, reason="the loss is not finite"),
        record("none", seed=1, loss=2.0),
        record("qk", seed=0, loss=1.0),
        record("qk", seed=1, loss=1.9),
    )
    assert "none at 0.03 (seed 0) diverged" in text
    assert "0.550 nats" not in text


def test_words_name_every_run_that_diverged_with_its_reason():
    nan = {"loss": None, "logit": None, "entropy": None, "reason": "the loss is not finite"}
    text = said(record("none", **nan), record("qk", loss=1.6))
    assert "none at 0.03 (seed 0) diverged: the loss is not finite." in text
    assert "nan" not in text
    assert "None" not in text
    high = record("none", loss=5.5, reason="the final loss 5.500 is not 0.1 below the initial 5.500")
    text = said(high, record("qk", loss=1.6))
    assert "none at 0.03 (seed 0) diverged: the final loss 5.500" in text
    assert "3.900 nats below none" in text


def test_words_about_one_run_state_its_numbers():
    text = said(record("qk", loss=1.628, logit=1234.5, entropy=0.99))
    for word in ("qk", "0.03", "1.628", "1,234.5", "0.990"):
        assert word in text
    assert "No run has ended" in said()
