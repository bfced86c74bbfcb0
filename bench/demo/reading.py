"""Short texts of a few facts, and questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.demo import words
from bench.demo.split import is_held_out
from bench.demo.story import draw_cast, story_questions, tell
from bench.demo.task import Task, contains


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: how it is said, what can be asked, and where its values come from.

    Forms refer to `{s}` (subject) and `{v}` (value). An answer says the statement again: what
    stands in a text can be found by what stands before it. All statements begin with "The", so
    that every subject has a space before it and the same token everywhere.
    """

    name: str
    subjects: Callable[[Random], str]
    values: Callable[[Random], str]
    statement: str
    value_questions: tuple[str, ...]
    subject_questions: tuple[str, ...]

    def say(self, subject: str, value: str) -> str:
        """The statement that `subject` has `value`."""
        return fix_articles(self.statement.format(s=subject, v=value))


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
    return f"{words.located(place)} the {place}"


def _animals(rng: Random) -> str:
    kinds = ("cats", "dogs", "goats", "ducks", "horses", "rabbits", "sheep", "cows", "birds")
    return f"{rng.randint(2, 19)} {rng.choice(kinds)}"


def _event(rng: Random) -> str:
    kinds = ("party", "concert", "race", "market", "wedding", "meeting", "lesson", "game", "trip")
    return rng.choice(kinds)


def _person(rng: Random) -> str:
    return rng.choice(words.CHARACTERS)


RELATIONS = (
    Relation(
        "owns",
        _person,
        _colored_item,
        "The {s} has a {v}.",
        ("What does the {s} have?",),
        ("Who has a {v}?", "Who has the {v}?"),
    ),
    Relation(
        "lives",
        _person,
        _home,
        "The {s} lives {v}.",
        ("Where does the {s} live?", "Where is the home of the {s}?"),
        ("Who lives {v}?",),
    ),
    Relation(
        "eats",
        _person,
        _choice(words.FOODS),
        "The {s} likes {v}.",
        ("What does the {s} like?", "What does the {s} like to eat?"),
        ("Who likes {v}?",),
    ),
    Relation(
        "works",
        _person,
        _choice(words.JOBS),
        "The {s} works as a {v}.",
        ("What is the job of the {s}?", "What does the {s} do for work?"),
        ("Who works as a {v}?",),
    ),
    Relation(
        "age",
        _person,
        _number(2, 99),
        "The {s} is {v} years old.",
        ("How old is the {s}?", "What is the age of the {s}?"),
        ("Who is {v} years old?",),
    ),
    Relation(
        "hobby",
        _person,
        _choice(words.ACTIVITIES),
        "The {s} enjoys {v}.",
        ("What does the {s} enjoy?", "What is the hobby of the {s}?"),
        ("Who enjoys {v}?",),
    ),
    Relation(
        "animals",
        _person,
        _animals,
        "The {s} keeps {v}.",
        ("Which animals does the {s} keep?",),
        ("Who keeps {v}?",),
    ),
    Relation(
        "called",
        _person,
        words.pick_name,
        "The {s} is called {v}.",
        ("What is the {s} called?", "What is the name of the {s}?"),
        ("Who is called {v}?", "Who is {v}?"),
    ),
    Relation(
        "spot",
        _choice(words.OBJECTS),
        _spot,
        "The {s} is {v}.",
        ("Where is the {s}?",),
        ("What is {v}?",),
    ),
    Relation(
        "color",
        _choice(words.OBJECTS),
        _choice(words.COLORS),
        "The {s} is {v}.",
        ("What color is the {s}?", "Which color does the {s} have?"),
        ("What is {v}?",),
    ),
    Relation(
        "day",
        _event,
        _choice(words.DAYS),
        "The {s} is on {v}.",
        ("When is the {s}?", "What day is the {s}?"),
        ("What happens on {v}?",),
    ),
)

MAX_DRAWS = 100
"""After so many draws the relations chosen for a text count as used up, and others join in."""

PROMPTS = (
    "{text} {question}",
    "{text}\n{question}",
    "{text}\n\n{question}",
    "Text: {text}\nQuestion: {question}",
    "Read this text: {text}\n{question}",
    "Here is a short text. {text} {question}",
    "Read the text and answer the question. {text} {question}",
)

SUBJECT_SHARE = 0.25
"""Of the questions, those that ask for the subject of a fact."""


def draw_facts(rng: Random, num_facts: int, *, held_out: bool) -> list[Fact]:
    """Facts of two to five relations, no subject or value twice within a relation."""
    relations = rng.sample(RELATIONS, rng.randint(2, 5))
    people = rng.sample(words.CHARACTERS, num_facts)
    facts: list[Fact] = []
    num_draws = 0
    while len(facts) < num_facts:
        num_draws += 1
        if num_draws > MAX_DRAWS:
            relations = list(RELATIONS)
        relation = rng.choice(relations)
        subject = rng.choice(people) if relation.subjects is _person else relation.subjects(rng)
        value = relation.values(rng)
        if is_held_out("fact", relation.name, subject, value) != held_out:
            continue
        rivals = [fact for fact in facts if fact.relation is relation]
        if any(subject == rival.subject or value == rival.value for rival in rivals):
            continue
        facts.append(Fact(relation, subject, value))
    return facts


def state(facts: list[Fact]) -> str:
    """A text that says all `facts`."""
    return " ".join(fact.relation.say(fact.subject, fact.value) for fact in facts)


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
    rivals = [rival for rival in facts if rival.relation is relation and rival is not fact]
    if rng.random() < SUBJECT_SHARE:
        question = rng.choice(relation.subject_questions)
        required = fact.subject
        forbidden = {rival.subject for rival in rivals}
    else:
        question = rng.choice(relation.value_questions)
        required = fact.value
        forbidden = {rival.value for rival in rivals}
    answer = relation.say(fact.subject, fact.value)
    return Task(
        "reading",
        fix_articles(question.format(s=fact.subject, v=fact.value)),
        answer,
        required=(required,),
        # A rival may be part of the right answer: the table that something else is on.
        forbidden=tuple(sorted(rival for rival in forbidden if not contains(answer, rival))),
    )


MOST_FACTS = 4
"""Of a text that a model is asked about."""


def facts_reading(
    rng: Random, *, held_out: bool, most_facts: int = MOST_FACTS
) -> tuple[str, list[Task]]:
    """A text of two to `most_facts` facts and one question about each, in random order."""
    facts = draw_facts(rng, rng.randint(2, most_facts), held_out=held_out)
    return state(facts), [ask(fact, facts, rng) for fact in rng.sample(facts, len(facts))]


def story_reading(rng: Random, *, held_out: bool) -> tuple[str, list[Task]]:
    """A story as the text, with questions about it."""
    cast = draw_cast(rng, held_out=held_out)
    return tell(cast, rng), story_questions(cast, rng)


def reading(rng: Random, *, held_out: bool, most_facts: int = MOST_FACTS) -> tuple[str, list[Task]]:
    """A text (a story, or two to `most_facts` facts) and questions about it."""
    if rng.random() < 0.2:
        return story_reading(rng, held_out=held_out)
    return facts_reading(rng, held_out=held_out, most_facts=most_facts)


def reading_task(rng: Random, *, held_out: bool) -> Task:
    """A prompt that holds a text and a question about it."""
    text, tasks = reading(rng, held_out=held_out)
    return with_text(text, tasks[0], rng)


def with_text(text: str, task: Task, rng: Random) -> Task:
    """`task` with `text` put into its prompt."""
    prompt = rng.choice(PROMPTS).format(text=text, question=task.prompt)
    return Task(task.kind, prompt, task.answer, task.required, task.forbidden)
