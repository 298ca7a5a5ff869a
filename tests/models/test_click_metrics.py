import math

import pytest
import torch
from scipy.stats import mannwhitneyu

from comera.models.dlrm import area_under_curve, click_metrics


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_curve_equals_scipys_statistic(ties):
    torch.manual_seed(0)
    scores = torch.randint(10, (300,)).double() if ties else torch.randn(300).double()
    labels = (torch.rand(300) < 0.3).double()
    u = mannwhitneyu(scores[labels > 0], scores[labels == 0]).statistic
    want = u / (labels.sum() * (1 - labels).sum())
    assert area_under_curve(scores, labels) == pytest.approx(float(want))


def test_known_predictions_have_the_known_figures():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    share = click_metrics(torch.full((4,), math.log(1 / 3)), labels)
    assert share["nce"] == pytest.approx(1)  # always the share of clicks
    assert share["auc"] == 0.5
    assert share["accuracy"] == 0.75
    sure = click_metrics(torch.tensor([9.0, -9.0, -9.0, -9.0]), labels)
    assert sure["auc"] == sure["accuracy"] == 1
    assert sure["nce"] < 0.01
    assert math.isnan(click_metrics(torch.randn(3), torch.ones(3))["auc"])
