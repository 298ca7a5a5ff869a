"""The models of the tests of rank learning serve here too."""

from tests.rank.conftest import *  # noqa: F403
