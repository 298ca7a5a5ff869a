"""Orders of rows in which neighbours are alike."""

import pytest
import torch

import comera


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100, 1000])
def test_places_are_a_permutation(count):
    places = comera.similar_rows(torch.randn(count, 3))
    assert torch.equal(places.sort().values, torch.arange(count))


def test_clusters_stay_together_at_every_level():
    """Eight clusters in pairs of pairs, shuffled: each ends on 32 places in a row."""
    corners = torch.tensor([[x, y, z] for x in (0.0, 9) for y in (0.0, 4) for z in (0.0, 2)])
    cluster = torch.arange(8).repeat(32)[torch.randperm(256)]
    places = comera.similar_rows(corners[cluster] + 0.1 * torch.randn(256, 3))
    found = cluster[places.argsort()].view(8, 32)
    assert (found == found[:, :1]).all()
    pairs = (found[:, 0] // 2).view(4, 2)
    assert (pairs == pairs[:, :1]).all()


def test_one_direction_is_sorted():
    values = torch.randn(333)
    found = values[comera.similar_rows(values[:, None]).argsort()]
    rising = values.sort().values
    assert torch.equal(found, rising) or torch.equal(found.flip(0), rising)


def test_rows_without_features_or_with_equal_ones_keep_their_order():
    assert torch.equal(comera.similar_rows(torch.ones(20, 2)), torch.arange(20))
    assert torch.equal(comera.similar_rows(torch.ones(20, 0)), torch.arange(20))


def test_rows_that_occur_with_the_same_things_have_like_features():
    """Two groups of readers and their books; books 8 and 9 nobody reads."""
    book = torch.randint(0, 4, (400,))
    group = torch.randint(0, 2, (400,))
    reader = torch.randint(0, 20, (400,)) + 20 * group
    features = comera.occurrence_features(book + 4 * group, reader, 10, 40, width=4)
    alike = features @ features.T
    assert min(alike[:4, :4].min(), alike[4:8, 4:8].min()) > 0.5
    assert alike[:4, 4:8].abs().max() < 0.05  # found by iteration
    assert not features[8:].any()
    again = comera.occurrence_features(book + 4 * group, reader, 10, 40, width=4)
    assert torch.equal(features, again)


def test_features_are_the_singular_vectors_of_the_scaled_matrix():
    row, other = torch.randint(0, 12, (60,)), torch.randint(0, 9, (60,))
    there = torch.zeros(12, 9)
    there[row, other] = 1
    degree = there.sum(1, keepdim=True).clamp(min=1) * there.sum(0).clamp(min=1)
    wanted = torch.nn.functional.normalize(there / degree.sqrt(), dim=1)  # but for a rotation
    features = comera.occurrence_features(row, other, 12, 9, width=9)
    torch.testing.assert_close(features @ features.T, wanted @ wanted.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comera.similar_rows(torch.ones(3)), r"\(3,\)"),
        (lambda: comera.similar_rows(torch.ones(3, 2, dtype=torch.long)), "int64"),
        (lambda: comera.similar_rows(torch.full((3, 2), torch.nan)), "finite"),
        (
            lambda: comera.occurrence_features(torch.tensor([5]), torch.tensor([0]), 5, 1),
            "rows holds 5, but there are only 5",
        ),
        (
            lambda: comera.occurrence_features(torch.tensor([0]), torch.tensor([-1]), 5, 1),
            "beside holds -1",
        ),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call()
