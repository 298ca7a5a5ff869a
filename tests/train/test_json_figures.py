import json
import math

import pytest

from comera.train.log import RunLog, from_json, last_logged, read_metrics, to_json


def strict(text: str):
    """Read JSON as other programs do, to which NaN is none."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_numbers_that_are_not_finite_are_null_and_come_back():
    facts = {"a.b": [1.5, {"c": math.inf}], "d": -math.inf, "e": None, "f": {"g": "nan"}}
    text = to_json(facts)
    assert strict(text) == {
        "a.b": [1.5, {"c": None}], "d": None, "e": None, "f": {"g": "nan"},
        "not_finite": {"a.b.1.c": "inf", "d": "-inf"},
    }  # fmt: skip
    assert from_json(text) == facts
    assert math.isnan(from_json(to_json({"x": math.nan}))["x"])
    assert to_json({"x": 1}) == '{"x": 1}'


def test_the_log_is_json_whatever_an_evaluation_finds(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.write(1, **{"eval/loss": 2.0, "eval/auc": math.nan})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line)["eval/auc"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["eval/auc"])
    assert math.isnan(last_logged(tmp_path, "eval/auc")[1])
