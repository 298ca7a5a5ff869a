import copy
import re

import pytest

from comera.nn.config import TTConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"rank": [4, 0, 4]}, "rank=[4, 0, 4]"),
        ({"embedding_rank": 0}, "embedding_rank=0"),
        ({"rank_pattern": {"head": 0}}, "rank_pattern['head']=0"),
    ],
)
def test_a_rank_below_one_is_refused_where_it_is_written(settings, named):
    with pytest.raises(ValueError, match=re.escape(f"{named} must be at least 1")):
        TTConfig(**settings)


def test_a_misspelt_setting_is_told_which_was_meant():
    with pytest.raises(
        TypeError, match=r"^rnk=3 is not a setting of TTConfig: did you mean rank\?$"
    ):
        TTConfig(rnk=3)
    with pytest.raises(TypeError, match="zzz=1 is not a setting of TTConfig; there are rank, emb"):
        TTConfig(rank=3, zzz=1)
    config = TTConfig(3, order=2)
    assert (config.rank, copy.deepcopy(config)) == (3, config)
