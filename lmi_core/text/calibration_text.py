"""The text that layers are measured on: a file of the user's, or one of a few kinds of writing."""

from __future__ import annotations

from pathlib import Path

from lmi_core.errors import UserError
from lmi_core.text.tokenizer import Tokenizer

DEFAULT_TEXT = """\
The ferry left the harbour at six in the morning, when the lamps along the quay were still lit.
Two men in yellow coats threw the ropes aboard, and a dog that nobody seemed to own watched them
go. By noon the wind had turned to the north-west; the captain gave orders to reduce speed, and
the few passengers went below, where the cook had made soup of peas, onions and smoked ham.

A triangle with sides of 3, 4 and 5 has a right angle, because 9 + 16 = 25. Water boils at 100
degrees Celsius at sea level, but at 3,000 metres at about 90. In 1969 people walked on the Moon
for the first time; 12 of them had done so by December 1972. The price rose by 4.5 % to $1,284.99.

def mean(values: list[float]) -> float:
    \"\"\"The arithmetic mean; 0.0 of nothing.\"\"\"
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else 0.0

{"id": 4711, "name": "Ana Pereira", "tags": ["new", "export"], "price": 19.5,
 "sold": false, "parent": null}

Question: Which of the two rivers is longer, and how do you know?
Answer: The second one. The table gives 1,230 km for it and 865 km for the first.

Dear Mr. Okafor, thank you for your letter of 3 May. We regret that the parts you ordered haven't
arrived; they were sent on 28 April and should have reached you within four days. Please tell us
whether you would rather wait or have your money back. Yours sincerely, J. Lindqvist

Das Haus am Ende der Strasse stand seit Jahren leer. Niemand wusste, wem es gehört. La petite
fille demanda pourquoi le ciel est bleu, et son grand-père ne sut que répondre. El tren llega a
las ocho y media; hay que estar en la estación antes. Il mercato è aperto ogni giorno tranne la
domenica.

SELECT city, COUNT(*) AS visits FROM trips WHERE year >= 2020 GROUP BY city
ORDER BY visits DESC LIMIT 10;

First wash the rice until the water runs clear. Then bring it to the boil with one and a half
times as much water, cover it, and leave it on the lowest heat for twelve minutes. Don't lift the
lid. Courts have held that a promise made without consideration is not, as a rule, binding on the
person who made it. Cells divide; most of them do so by copying their chromosomes and pulling the
copies apart.

User: I can't open the file. It says "permission denied".
Assistant: Who owns it? Run `ls -l report.txt` and look at the third column. If that isn't you,
ask its owner, or use `sudo` if you may.

Once upon a time there lived a fox who was afraid of the dark. Every evening she asked the owl to
stay awake, and every evening the owl, who stayed awake anyway, promised that it would.
"""
"""Prose, figures, code, data, dialogue, other languages: what a model may be asked about."""
_FEWEST_TOKENS = 32


def read_text(path: Path | None, name: str = "calibration_file") -> str:
    """The text of a calibration file; None: the one of above. UserError for what isn't a text,
    which is called ``name``."""
    if path is None:
        return DEFAULT_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{name} {path} can't be read: {error.strerror}", field="calibration_file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{name} {path} isn't a text in UTF-8", field="calibration_file") from None
    if not text.strip():
        raise UserError(f"{name} {path} is empty", field="calibration_file")
    return text


def sequences_of(
    text: str, tokenizer: Tokenizer, *, num_tokens: int, max_sequences: int
) -> list[list[int]]:
    """The first ``max_sequences`` pieces of ``num_tokens`` tokens each, the last one maybe shorter.

    UserError for too short a text.
    """
    # A token has some characters at most, so that no more of a long text is needed.
    ids = tokenizer.encode_now(text[: 32 * num_tokens * max_sequences])
    if len(ids) < _FEWEST_TOKENS:
        raise UserError(
            f"the calibration text has {len(ids)} tokens; give one of {_FEWEST_TOKENS} or more",
            field="calibration_file",
        )
    firsts = range(0, min(len(ids), num_tokens * max_sequences), num_tokens)
    return [ids[first : first + num_tokens] for first in firsts]
