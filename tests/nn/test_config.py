import copy
import re

import pytest

from comera.nn.targets import TTConfig

NO_RANKS = ["8", 2.5, True, [4, "x"]]
PATTERNS = ["rank_pattern", "shape_pattern", "hot_pattern"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, "rank=-1 must be at least 1"),
        ({"rank": [4, 0, 4]}, "rank=[4, 0, 4] must be at least 1"),
        ({"embedding_rank": 0}, "embedding_rank=0 must be at least 1"),
        ({"rank_pattern": {"head": 0}}, "rank_pattern['head']=0 must be at least 1"),
        *(({"rank": rank}, f"rank={rank!r} must be an int or a list of ints") for rank in NO_RANKS),
        *(({name: None}, f"{name}=None must be a dict of patterns; {{}} for") for name in PATTERNS),
        ({"init": "random"}, "init='random' must be one of 'orthogonal', 'normal', 'svd'"),
        ({"tied": "yes"}, "tied='yes' must be one of 'skip', 'share', 'untie'"),
        ({"scatter_rows": True, "init": "svd"}, "scatter_rows=True"),
        ({"rank": 3, "compression": 4}, "rank=3 and compression=4 say the same thing twice"),
        ({"compression": 0}, "compression=0 must be above 1"),
        ({"compression": 0.5}, "compression=0.5 must be above 1"),
        ({"compression": float("nan")}, "compression=nan must be above 1"),
        ({"tolerance": -1, "init": "svd"}, "tolerance=-1 must be in [0, 1)"),
        ({"order": 0}, "order=0 must be at least 1"),
        ({"order": 2.5}, "order=2.5 must be a whole number"),
        ({"embedding_order": 1}, "embedding_order=1 must be at least 2"),
        ({"hot_rows": -1}, "hot_rows=-1 must be at least 0"),
        ({"min_size": -5}, "min_size=-5 must be at least 0"),
        ({"prune_below": 1.0}, "prune_below=1.0 must be in [0, 1)"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"tokens": "4"}, "tokens='4' must be a whole number"),
    ],
)
def test_a_value_that_no_layer_can_have_is_refused_where_it_is_written(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        TTConfig(**settings)


def test_a_tolerance_needs_weights_to_approximate():
    with pytest.raises(ValueError, match=r"=0\.1 .* needs init=\"svd\", not init='orthogonal'"):
        TTConfig(tolerance=0.1)


def test_a_misspelt_setting_is_told_which_was_meant():
    with pytest.raises(
        TypeError, match=r"^rnk=3 is not a setting of TTConfig: did you mean rank\?$"
    ):
        TTConfig(rnk=3)
    with pytest.raises(TypeError, match="zzz=1 is not a setting of TTConfig; there are rank, emb"):
        TTConfig(rank=3, zzz=1)
    config = TTConfig(3, order=2)
    assert (config.rank, copy.deepcopy(config)) == (3, config)
