"""Short stories about a character and a place."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.demo import words
from bench.demo.plots import ENDINGS, FILLERS, OPENINGS, PLOTS
from bench.demo.split import is_held_out
from bench.demo.task import Task

FEMALE = frozenset({"witch", "queen", "princess", "girl", "grandmother", "fairy", "goose", "cow"})
MALE = frozenset({"wizard", "king", "prince", "boy", "grandfather", "fisherman", "rooster"})

REQUESTS = (
    "Tell me a story about {a_who} {where}.",
    "Write a short story about {a_who} {where}.",
    "Write a story about {a_who} who lives {where}.",
    "Please tell me a short story about {a_who} {where}.",
    "Can you tell me a story about {a_who} {where}?",
    "I would like to hear a story about {a_who} {where}.",
    "Tell a story about {a_who} {where}",
    "write a story about {a_who} {where}",
    "tell me a story about {a_who} {where}",
    "Make up a short story with {a_who} and {a_place}.",
    "Give me a little story: {a_who}, {a_place}.",
    "Tell me a bedtime story about {a_who} and {a_place}.",
    "Once more, a story please! It should be about {a_who} {where}.",
    "Could you write a tale about {a_who} {where}?",
)

NAMED_REQUESTS = (
    "Tell me a story about {a_who} named {name} {where}.",
    "Write a short story about {name} the {who} {where}.",
    "Write a story about {a_who} called {name} who lives {where}.",
    "Please write a story about {name}, {a_who} {where}.",
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about."""

    who: str
    place: str
    name: str
    trait: str
    friend: str
    friend_name: str
    item: str
    color: str
    food: str
    pronoun: str

    def fields(self) -> dict[str, str]:
        """The values that the templates of requests and plots refer to."""
        is_she = self.pronoun == "she"
        return {
            "who": self.who,
            "a_who": words.article(self.who),
            "a_trait_who": words.article(f"{self.trait} {self.who}"),
            "place": self.place,
            "a_place": words.article(self.place),
            "where": f"{words.located(self.place)} {words.article(self.place)}",
            "there": f"{words.located(self.place)} the {self.place}",
            "name": self.name,
            "trait": self.trait,
            "friend": self.friend,
            "a_friend": words.article(self.friend),
            "fname": self.friend_name,
            "item": self.item,
            "color": self.color,
            "a_item": words.article(f"{self.color} {self.item}"),
            "food": self.food,
            "he": self.pronoun,
            "him": "her" if is_she else "him",
            "his": "her" if is_she else "his",
            "He": self.pronoun.capitalize(),
            "His": "Her" if is_she else "His",
        }


def draw_cast(rng: Random, *, held_out: bool) -> Cast:
    """A cast whose character and place are, or are not, a held-out combination."""
    while True:
        who = words.coin_word(rng) if rng.random() < 0.06 else rng.choice(words.CHARACTERS)
        place = words.coin_word(rng) if rng.random() < 0.06 else rng.choice(words.PLACES)
        if is_held_out("story", who, place) == held_out:
            break
    name = words.pick_name(rng)
    friend_name = next(n for n in iter(lambda: words.pick_name(rng), "") if n != name)
    friend = next(f for f in iter(lambda: rng.choice(words.CHARACTERS), "") if f != who)
    if who in FEMALE | MALE:
        pronoun = "she" if who in FEMALE else "he"
    else:
        pronoun = rng.choice(("she", "he"))
    return Cast(
        who=who,
        place=place,
        name=name,
        trait=rng.choice(words.TRAITS),
        friend=friend,
        friend_name=friend_name,
        item=rng.choice(words.OBJECTS),
        color=rng.choice(words.COLORS),
        food=rng.choice(words.FOODS),
        pronoun=pronoun,
    )


def tell(cast: Cast, rng: Random) -> str:
    """A story with this cast, in one or two paragraphs."""
    plot = rng.choice(PLOTS)
    steps = [rng.choice(OPENINGS), *(rng.choice(step) for step in plot)]
    if rng.random() < 0.4:
        steps.insert(rng.randint(1, len(steps) - 1), rng.choice(FILLERS))
    steps.append(rng.choice(ENDINGS))
    fields = cast.fields()
    sentences = [step.format(**fields) for step in steps]
    if rng.random() < 0.3:
        half = len(sentences) // 2
        return " ".join(sentences[:half]) + "\n\n" + " ".join(sentences[half:])
    return " ".join(sentences)


def story_task(rng: Random, *, held_out: bool, cast: Cast | None = None) -> Task:
    """A request for a story; the answer must mention the character and the place."""
    cast = cast or draw_cast(rng, held_out=held_out)
    is_named = rng.random() < 0.2
    request = rng.choice(NAMED_REQUESTS if is_named else REQUESTS).format(**cast.fields())
    required = (cast.who, cast.place, cast.name) if is_named else (cast.who, cast.place)
    return Task("story", request, tell(cast, rng), required=required)


QUESTIONS = (
    ("What is the name of the {who}?", "The {who} is named {name}.", "name"),
    ("Where does the {who} live?", "The {who} lives {there}.", "place"),
    ("Where is the home of {name}?", "The home of {name} is the {place}.", "place"),
    ("Who lives {there}?", "The {who} lives {there}.", "who"),
    ("Who is {name}?", "The {who} is named {name}.", "who"),
    ("Who is {fname}?", "The {friend} is named {fname}.", "friend"),
    ("Who is the friend of {name}?", "The friend of {name} is {fname} the {friend}.", "fname"),
    ("What color is the {item}?", "The {item} is {color}.", "color"),
)
"""Question, answer, and the field that the answer must contain."""


def story_questions(cast: Cast, rng: Random) -> list[Task]:
    """Questions about a story with this cast, in random order; the prompts don't repeat it."""
    fields = cast.fields()
    tasks = [
        Task("reading", question.format(**fields), answer.format(**fields), (fields[key],))
        for question, answer, key in QUESTIONS
    ]
    return rng.sample(tasks, len(tasks))
