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
