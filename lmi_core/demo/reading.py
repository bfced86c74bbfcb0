"""Short texts of a few facts, and questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lmi_core.demo import words
from lmi_core.demo.split import is_held_out
from lmi_core.demo.story import draw_cast, story_questions, tell
from lmi_core.demo.task import Task, contains


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: how it is said, what can be asked, and where its values come from.

    Forms refer to `{s}` (subject) and `{v}` (value). `subject_forms` ask for the subject,
    `value_forms` for the value; each is a question with its answer.
    """

    name: str
    subjects: Callable[[Random], str]
    values: Callable[[Random], str]
    statements: tuple[str, ...]
    value_forms: tuple[tuple[str, str], ...]
    subject_forms: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """One subject with its value under a relation."""

    relation: Relation
    subject: str
    value: str


def _choice(options: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(options)


def _number(low: int, high: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randint(low, high))


def _colored_item(rng: Random) -> str:
    return f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS)}"


def _spot(rng: Random) -> str:
    preposition = rng.choice(("in", "under", "behind", "next to", "on"))
    furniture = ("table", "bed", "chair", "door", "box", "basket", "stove", "window", "cupboard")
    return f"{preposition} the {rng.choice(furniture)}"


def _home(rng: Random) -> str:
    place = rng.choice(words.PLACES)
    return f"{words.located(place)} {words.article(place)}"


def _animals(rng: Random) -> str:
    kinds = ("cats", "dogs", "goats", "ducks", "horses", "rabbits", "sheep", "cows", "birds")
    return f"{rng.randint(2, 19)} {rng.choice(kinds)}"


def _event(rng: Random) -> str:
    kinds = ("party", "concert", "race", "market", "wedding", "meeting", "lesson", "game", "trip")
    return rng.choice(kinds)


RELATIONS = (
    Relation(
        "owns",
        words.pick_name,
        _colored_item,
        ("{s} has a {v}.", "{s} owns a {v}.", "{s} bought a {v}."),
        (("What does {s} have?", "{s} has a {v}."),),
        (("Who has the {v}?", "{s} has the {v}."), ("Who owns a {v}?", "{s} owns a {v}.")),
    ),
    Relation(
        "lives",
        words.pick_name,
        _home,
        ("{s} lives {v}.", "The home of {s} is {v}."),
        (("Where does {s} live?", "{s} lives {v}."), ("Where is {s} at home?", "{s} lives {v}.")),
        (("Who lives {v}?", "{s} lives {v}."),),
    ),
    Relation(
        "eats",
        words.pick_name,
        _choice(words.FOODS),
        ("{s} likes {v}.", "{s} loves to eat {v}.", "The favorite food of {s} is {v}."),
        (
            ("What does {s} like to eat?", "{s} likes {v}."),
            ("What is the favorite food of {s}?", "The favorite food of {s} is {v}."),
        ),
        (("Who likes {v}?", "{s} likes {v}."),),
    ),
    Relation(
        "works",
        words.pick_name,
        _choice(words.JOBS),
        ("{s} is a {v}.", "{s} works as a {v}."),
        (
            ("What is the job of {s}?", "{s} is a {v}."),
            ("What does {s} do for work?", "{s} works as a {v}."),
        ),
        (("Who is a {v}?", "{s} is a {v}."), ("Who is the {v}?", "{s} is the {v}.")),
    ),
    Relation(
        "age",
        words.pick_name,
        _number(2, 99),
        ("{s} is {v} years old.", "{s} turned {v} years old."),
        (("How old is {s}?", "{s} is {v} years old."),),
        (("Who is {v} years old?", "{s} is {v} years old."),),
    ),
    Relation(
        "hobby",
        words.pick_name,
        _choice(words.ACTIVITIES),
        ("{s} enjoys {v}.", "The hobby of {s} is {v}."),
        (("What is the hobby of {s}?", "The hobby of {s} is {v}."),),
        (("Who enjoys {v}?", "{s} enjoys {v}."),),
    ),
    Relation(
        "animals",
        words.pick_name,
        _animals,
        ("{s} has {v}.", "{s} keeps {v}."),
        (("Which animals does {s} have?", "{s} has {v}."),),
        (("Who has {v}?", "{s} has {v}."),),
    ),
    Relation(
        "spot",
        _choice(words.OBJECTS),
        _spot,
        ("The {s} is {v}.", "Someone put the {s} {v}.", "You can find the {s} {v}."),
        (("Where is the {s}?", "The {s} is {v}."),),
        (("What is {v}?", "The {s} is {v}."),),
    ),
    Relation(
        "color",
        _choice(words.OBJECTS),
        _choice(words.COLORS),
        ("The {s} is {v}.", "The color of the {s} is {v}."),
        (
            ("What color is the {s}?", "The {s} is {v}."),
            ("Which color is the {s}?", "The {s} is {v}."),
        ),
        (("What is {v}?", "The {s} is {v}."),),
    ),
    Relation(
        "day",
        _event,
        _choice(words.DAYS),
        ("The {s} is on {v}.", "On {v} there is a {s}."),
        (("When is the {s}?", "The {s} is on {v}."), ("What day is the {s}?", "It is on {v}.")),
        (("What happens on {v}?", "The {s} is on {v}."),),
    ),
)

MAX_DRAWS = 100
"""After so many draws the relations chosen for a text count as used up, and others join in."""

PROMPTS = (
    "{text}\n\n{question}",
    "{text} {question}",
    "Text: {text}\nQuestion: {question}",
    "Text: {text}\n\nQuestion: {question}",
    "Read this text: {text}\n\n{question}",
    "Read the text and answer the question.\n\n{text}\n\n{question}",
    "Here is a short text.\n{text}\n{question}",
    'Answer the question about this text: "{text}" {question}',
    "{question}\n\n{text}",
)


def draw_facts(rng: Random, num_facts: int, *, held_out: bool) -> list[Fact]:
    """Facts of one to three relations, no subject or value twice within a relation."""
    relations = rng.sample(RELATIONS, rng.randint(1, 3))
    names = [words.pick_name(rng) for _ in range(num_facts)]
    facts: list[Fact] = []
    num_draws = 0
    while len(facts) < num_facts:
        num_draws += 1
        if num_draws > MAX_DRAWS:
            relations = list(RELATIONS)
        relation = rng.choice(relations)
        is_person = relation.subjects is words.pick_name
        subject = rng.choice(names) if is_person else relation.subjects(rng)
        value = relation.values(rng)
        if is_held_out("fact", relation.name, subject, value) != held_out:
            continue
        rivals = [fact for fact in facts if fact.relation is relation]
        if any(subject == rival.subject or value == rival.value for rival in rivals):
            continue
        facts.append(Fact(relation, subject, value))
    return facts


def state(facts: list[Fact], rng: Random) -> str:
    """A text that says all `facts`."""
    sentences = (
        rng.choice(fact.relation.statements).format(s=fact.subject, v=fact.value) for fact in facts
    )
    return " ".join(map(fix_articles, sentences))


def fix_articles(text: str) -> str:
    """`text` with "a" turned to "an" before vowels."""
    before = text.split(" ")
    for index, word in enumerate(before[:-1]):
        if word in ("a", "A") and before[index + 1][:1] in "aeiou":
            before[index] = word + "n"
    return " ".join(before)


def ask(fact: Fact, facts: list[Fact], rng: Random) -> Task:
    """A question about `fact`, one of `facts`; the prompt is the question alone."""
    relation = fact.relation
    asks_subject = bool(relation.subject_forms) and rng.random() < 0.4
    question, answer = rng.choice(relation.subject_forms if asks_subject else relation.value_forms)
    rivals = [rival for rival in facts if rival.relation is relation and rival is not fact]
    if asks_subject:
        required = fact.subject
        forbidden = {rival.subject for rival in rivals}
    else:
        required = fact.value
        forbidden = {rival.value for rival in rivals}
    answer = fix_articles(answer.format(s=fact.subject, v=fact.value))
    return Task(
        "reading",
        fix_articles(question.format(s=fact.subject, v=fact.value)),
        answer,
        required=(required.removeprefix("in a ").removeprefix("on a "),),
        # A rival may be part of the right answer: the table that something else is on.
        forbidden=tuple(sorted(rival for rival in forbidden if not contains(answer, rival))),
    )


def facts_reading(rng: Random, *, held_out: bool) -> tuple[str, list[Task]]:
    """A text of facts and one question about each, in random order."""
    facts = draw_facts(rng, rng.randint(2, 6), held_out=held_out)
    text = state(facts, rng)
    # Colors and spots may share an object; asking "What is red?" stays clear within a relation.
    return text, [ask(fact, facts, rng) for fact in rng.sample(facts, len(facts))]


def story_reading(rng: Random, *, held_out: bool) -> tuple[str, list[Task]]:
    """A story as the text, with questions about it."""
    cast = draw_cast(rng, held_out=held_out)
    return tell(cast, rng), story_questions(cast, rng)


def reading(rng: Random, *, held_out: bool) -> tuple[str, list[Task]]:
    """A text and questions about it."""
    make = story_reading if rng.random() < 0.2 else facts_reading
    return make(rng, held_out=held_out)


def reading_task(rng: Random, *, held_out: bool) -> Task:
    """A prompt that holds a text and a question about it."""
    text, tasks = reading(rng, held_out=held_out)
    return with_text(text, tasks[0], rng)


def with_text(text: str, task: Task, rng: Random) -> Task:
    """`task` with `text` put into its prompt."""
    prompt = rng.choice(PROMPTS).format(text=text, question=task.prompt)
    return Task(task.kind, prompt, task.answer, task.required, task.forbidden)
