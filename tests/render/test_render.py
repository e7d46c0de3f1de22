"""What every format promises: honest numbers, one line a visit, nothing hidden, and no power to names from outside."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanprobe.errors import UsageError
from nanprobe.records import Finding, ReplayReport, VisitRow
from nanprobe.render import FORMATS, numbers, render
from nanprobe.render.ink import Ink
from nanprobe.render.names import neutral, one_line, shortened_class, shortened_path
from nanprobe.render.rows import Fold, Shown, fold_words, select
from nanprobe.serialize import from_dict
from tests.render.reports import (
    STORIES,
    WEIRD,
    absorbed_gradient,
    backward_origin,
    clean,
    deep,
    fp16_overflow,
    full_precision,
    nan_in_batch,
    own_code,
    silent_divergence,
    two_drifts,
    weird_names,
)

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_the_formats_are_those_that_exist() -> None:
    assert FORMATS[0] == "table"
    for name in FORMATS:
        assert render(clean(), name).endswith("\n")
    with pytest.raises(UsageError, match="no format 'html'; the formats are table, json, markdown"):
        render(clean(), "html")


@pytest.mark.parametrize("name", STORIES)
def test_a_saved_report_is_shown_as_the_one_that_was_made(name: str) -> None:
    report = STORIES[name]()
    saved = from_dict(json.loads(render(report, "json")))
    for format in ("table", "markdown"):
        assert render(saved, format, verbose=True) == render(report, format, verbose=True)


@pytest.mark.parametrize("name", STORIES)
def test_colour_only_adds_escapes(name: str) -> None:
    report = STORIES[name]()
    plain, coloured = render(report), render(report, color=True)
    assert "\x1b" not in plain
    assert ESCAPE.search(coloured)
    assert ESCAPE.sub("", coloured) == plain


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize("name", sorted(set(STORIES) - {"weird-names"}))
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    for verbose in (False, True):
        for line in render(STORIES[name](), width=width, verbose=verbose).split("\n"):
            assert len(line) <= width


def test_a_width_of_nothing_still_shows_a_table() -> None:
    assert ">>" in render(fp16_overflow(), width=1)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", STORIES)
def test_every_visit_is_shown_or_counted_once_and_in_order(name: str, verbose: bool) -> None:
    report = STORIES[name]()
    rows: list[VisitRow] = []
    for item in select(report, Ink(), verbose=verbose):
        match item:
            case Shown(row, _):
                rows.append(row)
            case Fold(folded):
                assert not verbose
                assert sum(
                    int(n) for n in re.findall(r"(\d+) (?:visit|gradient)s?\b", fold_words(report, folded))
                ) == len(folded)
                rows += folded
    assert tuple(rows) == report.modules


def test_verbose_shows_every_visit_and_the_time_by_stage() -> None:
    report = deep()
    text = render(report, width=200, verbose=True)
    assert "visits clean" not in text
    for row in report.modules:
        assert (row.module or "(root)") in text
    assert "Time: import 1.25 s, load 31 ms" in text
    assert "Time:" not in render(report, width=200)


def test_the_culprit_is_marked_by_a_word_and_keeps_two_rows_around_it() -> None:
    lines = render(fp16_overflow(), width=140).split("\n")
    at = next(at for at, line in enumerate(lines) if line.startswith(">>"))
    assert "encoder.layer.3.output.dense" in lines[at]
    assert "encoder.layer.3.norm" in lines[at - 2]
    assert "encoder.layer.3.intermediate" in lines[at - 1]
    assert "encoder.layer.3.output.norm" in lines[at + 1]
    assert "visits clean" in lines[at - 3]


def test_the_parents_own_code_stands_between_its_children() -> None:
    lines = render(own_code(), width=140).split("\n")
    at = next(at for at, line in enumerate(lines) if line.startswith(">>"))
    assert "own code of layers.1.mlp, between up_proj and down_proj" in lines[at]
    assert "up_proj" in lines[at - 1]
    assert "down_proj" in lines[at + 1]


def test_verdict_names_place_count_and_limit() -> None:
    first = render(fp16_overflow(), width=300).split("\n")[0]
    assert first == (
        "fp16 overflows in encoder.layer.3.output.dense (Linear): 97 of 159,744 elements are Inf where FP32 reaches "
        "190,212 (fp16's largest is 65,504), first at [0, 17, 212], in samples 0, 2."
    )


def test_what_was_in_the_batch_is_no_precisions_fault() -> None:
    first = render(nan_in_batch(), width=300).split("\n")[0]
    assert "NaN was already in the batch" in first
    assert "field x: 3 of 2,048 elements, first at [1, 0, 7], in sample 1" in first
    assert "No precision is to blame" in first


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_names_from_outside_have_no_power(format: str) -> None:
    text = render(weird_names(), format, verbose=True)
    for character in text:
        assert character == "\n" or unicodedata.category(character)[0] != "C"
    if format == "markdown":
        outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
        assert "<" not in outside_code.replace("\\<", "")
        assert "@" not in outside_code


def test_every_row_of_a_markdown_table_has_the_same_number_of_cells() -> None:
    for story in STORIES.values():
        rows = [line for line in render(story(), "markdown", verbose=True).split("\n") if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_damaged_but_readable_report_is_still_shown() -> None:
    report = fp16_overflow()
    odd = dataclasses.replace(
        report,
        verdict="unheard-of",
        modules=(),
        conditions={"mode": 3, "loss_scale": {}, "train": None},
        subject={"config": ["x"]},
        timings={},
    )
    for format in FORMATS:
        assert render(odd, format, verbose=True)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=500)
@given(FINITE)
def test_a_number_reads_as_zero_only_when_it_is_zero(value: float) -> None:
    for write in (numbers.magnitude, numbers.bits, numbers.loss):
        assert (float(write(value).replace(",", "")) == 0) == (value == 0), write
    assert (float(numbers.error(abs(value))) == 0) == (value == 0)


@settings(max_examples=500)
@given(st.floats(min_value=1e-30, max_value=1e30))
def test_a_number_is_close_to_what_is_written(value: float) -> None:
    assert math.isclose(float(numbers.magnitude(value).replace(",", "")), value, rel_tol=0.0051)
    assert math.isclose(float(numbers.loss(value).replace(",", "")), value, rel_tol=0.0001)
    assert math.isclose(float(numbers.error(value)), value, rel_tol=0.051)


def test_numbers_read_as_people_write_them() -> None:
    written = {
        0.42: "0.42",
        31.0: "31",
        65504.0: "65,504",
        65519.4: "65,519",
        190212.0: "190,212",
        9_999_999.7: "1e7",
        1.987e7: "1.99e7",
        1e-4: "1e-4",
        999.7: "1,000",
    }
    assert {value: numbers.magnitude(value) for value in written} == written
    assert [numbers.error(value) for value in (0, 2.1e-4, 0.7231, 0.96, 42.0, 1e6)] == [
        "0",
        "2.1e-4",
        "7.2e-1",
        "0.96",
        "42",
        "1.0e6",
    ]
    assert [numbers.bits(value) for value in (0.0, 0.04, -0.62, 12.44)] == ["0", "0.04", "-0.6", "12.4"]
    for write in (numbers.magnitude, numbers.error, numbers.bits, numbers.loss):
        assert [write(value) for value in (math.nan, math.inf, -math.inf, None)] == ["NaN", "Inf", "-Inf", "-"]
    assert numbers.of(97, 49152) == "97 of 49,152 elements"
    assert numbers.of(12, 12) == "all 12 elements"
    assert numbers.of(1, 1) == "the only element"
    assert numbers.kinds(90, 0, 7) == "90 NaN, 7 -Inf"


@given(st.text(max_size=60), st.integers(min_value=5, max_value=40))
def test_a_shortened_name_fits_and_keeps_its_tail(text: str, width: int) -> None:
    for shorten in (shortened_class, shortened_path):
        short = shorten(text, width)
        assert len(short) <= width
        assert len(text) > width or short == text
    if len(text) > width:
        assert shortened_path(text, width).endswith(text[-2:])
        assert shortened_class(text, width).startswith(text[:3])


def test_a_path_is_cut_in_the_middle_and_a_class_at_its_end() -> None:
    path = "transformer.decoder.blocks.40.feed_forward.output_projection"
    assert shortened_path(path, 40) == "trans.." + path[-33:]
    assert shortened_path("grad " + path, 45) == "grad trans.." + path[-33:]
    assert shortened_class("QuantizableLinear", 12) == "Quantizabl.."


@given(st.text(max_size=40))
def test_neutral_text_is_printable_and_plain_text_is_left_alone(text: str) -> None:
    assert neutral(text).isprintable()
    assert one_line(text).isprintable()
    assert not text.isprintable() or neutral(text) == text


def test_a_weird_name_is_spelled_out() -> None:
    assert neutral(WEIRD) == "layers.\\x1b[31mred\\x1b[0m|<script>alert(1)</script>`tick`\\n\\u202eback"


def report_with_states(*states: str) -> ReplayReport:
    report = deep()
    rows = tuple(
        dataclasses.replace(
            row, precisions={**row.precisions, "fp16": dataclasses.replace(row.precisions["fp16"], state=state)}
        )
        for row, state in zip(report.modules, states, strict=False)
    )
    return dataclasses.replace(report, modules=rows + report.modules[len(rows) :])


def test_a_fold_never_says_clean_of_a_run_that_is_not() -> None:
    text = render(report_with_states("diverged"), width=140)
    assert "fp16 1 diverged, 118 clean; bf16 clean" in text
    assert "119 visits clean" not in text


def test_what_to_do_next_fits_how_the_replay_was_started() -> None:
    assert "for every row, add `--verbose`" in render(fp16_overflow())
    from_python = dataclasses.replace(fp16_overflow(), subject={})
    assert "for every row, `report.render(verbose=True)`" in render(from_python)
    assert "--config" not in render(from_python)


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.split("\n") if all(word in line for word in words)]


def test_a_command_repeats_the_overrides_of_this_one() -> None:
    given = fp16_overflow()
    overrides = ["--checkpoint", "it's x.pt", "--mode", "cast", "--dtypes", "fp16,bf16"]
    report = dataclasses.replace(given, subject={"config": "nanprobe.yaml", "overrides": overrides})
    again = "nanprobe replay --config nanprobe.yaml --checkpoint 'it'\"'\"'s x.pt' --mode cast --dtype fp16"
    assert again in render(report, width=400)
    assert "nanprobe replay --config nanprobe.yaml --dtype fp16" in render(given, width=400)


def test_every_precision_at_fault_is_named_the_worst_first() -> None:
    first = render(two_drifts(), width=400).split("\n")[0]
    assert first.startswith("bf16 drifts from FP32 in time (TimeEncoding): relative error 3.3e-1")
    assert "fp16 drifts in the same place: relative error 2.0e-2 where 7.8e-3 is tolerated." in first
    assert "--dtype bf16`" in render(two_drifts(), width=400)
    report = fp16_overflow()
    bad = report.first_bad
    assert bad is not None
    results = dict(report.precisions)
    results["bf16"] = dataclasses.replace(results["fp16"], first_bad=dataclasses.replace(bad, precision="bf16"))
    both = render(dataclasses.replace(report, precisions=results), width=400).split("\n")[0]
    assert both.endswith("bf16 goes wrong in the same place.")


def test_what_is_absorbed_contradicts_nothing() -> None:
    text = render(absorbed_gradient(), width=400)
    assert text.startswith(
        "Nothing that lasts goes wrong in fp16 or bf16: 37 NaN appear in the backward pass of pool (Pool), operation "
        "aten.sqrt, in every precision and are absorbed; no parameter gradient is affected."
    )
    (line,) = lines_with(text, "fp16  clean")
    assert "37 NaN in the backward pass of pool (Pool), operation aten.sqrt are absorbed" in line
    assert "goes bad" not in text
    assert "65,504" not in text
    assert ">>" not in text


def test_what_leaves_a_backward_stands_between_the_gradients() -> None:
    lines = render(backward_origin(), width=140).split("\n")
    at = next(at for at, line in enumerate(lines) if line.startswith(">>"))
    assert lines[at] == ">>  backward of distance: 32 NaN of 256 elements leave it (fp16)"
    assert "grad distance" in lines[at - 1]
    assert "grad proj" in lines[at + 1]
    assert "32 of 256 elements are NaN where" in lines[0]


def test_a_fault_of_no_precision_needs_no_largest_value() -> None:
    report = fp16_overflow()
    bad = report.first_bad
    assert bad is not None
    nobodys = dataclasses.replace(bad, precision_related=False, mechanism=None)
    assert "largest is" not in render(
        dataclasses.replace(report, verdict="not-precision", first_bad=nobodys), width=400
    )
    of_zero = dataclasses.replace(bad, mechanism="domain-error")
    assert "largest is" not in render(dataclasses.replace(report, first_bad=of_zero), width=400)
    assert "largest is" in render(report, width=400)


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_the_legend_says_what_the_numbers_are(format: str) -> None:
    for name, story in STORIES.items():
        text = render(story(), format, width=200)
        assert "numbers are largest magnitudes (absmax)" in text, name
        shown = bool(re.search(r"rel.err \W* *local", text))
        assert ("local the module's own error, on" in text) == shown, name
    assert "local the module's own error, on FP32's inputs" in render(silent_divergence(), format, width=200)


def test_the_title_keeps_absmax_where_it_fits() -> None:
    assert lines_with(render(absorbed_gradient(), width=80), "module", "fp32 absmax")
    assert lines_with(render(two_drifts(), width=80), "module", "fp32 absmax")


def test_a_clean_report_shows_only_its_largest_errors() -> None:
    report = clean()
    shown = [item.row for item in select(report, Ink(), verbose=False) if isinstance(item, Shown)]
    assert len(shown) <= 6
    assert any(row.precisions["bf16"].rel_error == 0.0049 for row in shown)
    assert "the rows shown have the largest errors" in render(report, width=200)
    assert "largest errors" not in render(fp16_overflow(), width=200)


def test_advice_is_given_once_and_claims_no_more_than_it_can() -> None:
    text = render(fp16_overflow(), width=400)
    assert len(re.findall("keep_fp32", text)) == 1
    assert lines_with(text, "keep", "in FP32 (not verified): add `keep_fp32: [")
    (repair,) = lines_with(render(nan_in_batch(), width=400), "try: find out where sample 1")
    assert "not verified" not in repair
    (drift,) = lines_with(render(silent_divergence(), width=400), "try: Keep model.rotary_emb in FP32")
    assert '`keep_fp32: ["model.rotary_emb"]`' in drift
    from_python = render(dataclasses.replace(silent_divergence(), subject={}), width=400)
    assert 'in FP32 (not verified): pass `keep_fp32=["model.rotary_emb"]`' in from_python


def test_full_precision_speaks_of_no_autocast() -> None:
    for format in ("table", "markdown"):
        text = render(full_precision(), format)
        assert "autocast" not in text
        assert "2 lists of modules have no forward of their own" in text
    assert "autocast" in render(clean())


def test_many_bad_gradients_are_summed_up_in_verbose_too() -> None:
    report = clean()
    rows = tuple(
        dataclasses.replace(
            row, precisions={**row.precisions, "fp16": dataclasses.replace(row.precisions["fp16"], nan=3)}
        )
        for row in report.gradients
    )
    everything = dataclasses.replace(report, gradients=rows)
    assert "  - fp16: all 8 parameters non-finite\n" in render(everything, width=200, verbose=True)
    most = dataclasses.replace(report, gradients=(report.gradients[0], *rows[1:]))
    finite = "fp16: 7 of 8 parameters non-finite (finite: encoder.layer.0.norm.weight)"
    assert finite in render(most, width=200, verbose=True)


def test_markdown_says_what_it_is_about_and_keeps_its_lists_apart() -> None:
    text = render(own_code(), "markdown")
    assert text.startswith("## nanprobe compare-precisions\n\n**fp16 ")
    assert "config `nanprobe.yaml`, checkpoint `model.safetensors`, batch `bad.pt`, nanprobe 0.1.0" in text
    assert "\n\n### Coverage and conditions\n\n- Coverage: " in text
    (row,) = lines_with(text, "| >>")
    assert "own code" not in row
    assert lines_with(text, "- 1: own code of `layers.1.mlp`, between `up_proj` and `down_proj`")


def test_findings_that_differ_in_precision_only_share_a_line() -> None:
    found = [
        Finding(rule="masked-gradient", severity="warning", precision=name, module="pool", message="37 NaN in backward")
        for name in ("fp16", "bf16")
    ]
    text = render(dataclasses.replace(absorbed_gradient(), findings=tuple(found)), width=200)
    assert text.count("37 NaN in backward") == 1
    assert "37 NaN in backward [masked-gradient, fp16, bf16, pool]" in text
