"""The table of what works is about the rows that the tests run."""

from tests.system.compatibility import all_rows, documented_rows


def test_the_document_has_all_rows_and_no_others() -> None:
    """After adding a row, run `python -m tests.system.compatibility`."""
    assert sorted(documented_rows()) == sorted(title for title, _, _ in all_rows())
