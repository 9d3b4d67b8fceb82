"""The table in docs/compatibility.md has the rows that the tests run."""

import pytest

from tests.system.compatibility import all_rows, documented_rows
from tests.system.fuzzing.wrapping import OF_SOME_RELEASES


@pytest.mark.quick
def test_the_document_has_all_rows_and_no_others() -> None:
    """After adding a row, run `python -m tests.system.compatibility`."""
    documented, run = set(documented_rows()), {title for title, _, _ in all_rows()}
    assert len(documented) == len(documented_rows())
    assert documented ^ run <= set(OF_SOME_RELEASES)
