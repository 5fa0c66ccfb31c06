"""Options of scripts that count something take no less than 1."""

import pytest


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"tokenize_text.py --input a.txt --output out --{key}={{}}"
            for key in ("shard-megabytes", "max-documents", "processes")
        ),
        "inspect_data.py data --documents {}",
        "theorem.py --steps {}",
    ],
)
@pytest.mark.parametrize("number", ["0", "-1", "1.5"])
def test_a_number_below_one_is_refused(command, words, number):
    status, _, error = command(*words.format(number).split())
    assert status == 2 and f"{number} should be a whole number, 1 or more" in error
