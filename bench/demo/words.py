"""The words that the generator puts together, and the few rules of grammar that they need."""

# ruff: noqa: SIM905 -- lists of words are easier to read as text

from __future__ import annotations

from random import Random

CHARACTERS = tuple(
    """fox bear rabbit owl cat dog mouse dragon knight wizard witch queen king prince princess
    pirate robot farmer baker teacher doctor painter sailor gardener giant fairy ghost turtle frog
    duck goose horse pony donkey cow pig sheep goat wolf lion tiger elephant monkey giraffe zebra
    penguin whale dolphin crab snail bee butterfly spider squirrel hedgehog beaver badger otter
    deer raven sparrow parrot swan unicorn astronaut explorer inventor musician dancer shepherd
    fisherman miner clown detective nurse student cook hunter boy girl grandmother grandfather
    dinosaur kitten puppy lizard snake eagle rooster camel kangaroo koala panda""".split()
)

PLACES = tuple(
    """castle forest garden village city desert cave tower palace farm barn island jungle lighthouse
    library museum school kitchen market harbor meadow valley swamp mill cottage bakery theater
    hospital station factory workshop tunnel mine temple park zoo circus playground stable igloo
    treehouse greenhouse mansion cabin tent submarine spaceship airport bridge beach orchard
    vineyard canyon windmill monastery inn tavern attic cellar volcano lagoon glacier""".split()
)

ON_PLACES = frozenset("farm island bridge beach glacier volcano".split())
AT_PLACES = frozenset("playground station airport".split())
"""Places with a preposition of their own; all others take "in"."""

NAMES = tuple(
    """Mila Tom Anna Ben Clara Daniel Ella Felix Grace Henry Iris Jack Kate Leo Mia Noah Olive Paul
    Rosa Sam Tina Victor Wendy Zoe Alma Bruno Cora Dora Emil Flora Gus Hanna Ivan Julia Karl Lily
    Max Nora Oscar Penny Quinn Ruby Simon Tess Ursula Vera Walter Yara Arlo Bella Charlie David
    Emma Frank Gina Hugo Ida Jonas Lena Maria Nina Otto Peter Rita Sofia Theo Lucy Alice Bob Carol
    John Mary Sarah James Adam Eve George Helen Martin Laura Mark Susan""".split()
)

OBJECTS = tuple(
    """key book lamp map ring crown coin ball kite drum flute bell box basket bottle cup mirror
    clock candle ladder rope boat wagon sled umbrella hat scarf coat boot blanket pillow chair
    table brush feather shell stone pearl flower seed apple pear cake pie cookie lantern telescope
    compass whistle violin guitar puppet doll robot balloon bicycle bucket shovel hammer needle
    pencil letter painting necklace button bag spoon bowl sword shield wand cloak egg nest jar
    net bracelet trumpet piano backpack car train plane""".split()
)

COLORS = tuple(
    """red blue green yellow orange purple pink brown black white gray golden silver""".split()
)

TRAITS = tuple(
    """little brave clever kind shy curious happy lonely lazy proud gentle hungry sleepy funny quiet
    young old tiny friendly careful cheerful grumpy patient polite silly strong wise honest busy
    small big""".split()
)

FOODS = tuple(
    """bread cheese soup rice pasta honey jam milk salad cake pie cookies apples pears grapes
    cherries plums berries nuts carrots beans corn potatoes tomatoes onions pancakes eggs butter
    tea juice chocolate bananas oranges lemons peaches mushrooms pizza""".split()
)

JOBS = tuple(
    """baker teacher doctor painter sailor gardener farmer pilot singer writer driver nurse builder
    carpenter tailor cook dancer musician scientist engineer librarian shepherd judge waiter actor
    lawyer mechanic firefighter""".split()
)

WEATHERS = tuple("sunny rainy cloudy windy snowy foggy stormy cold warm hot bright".split())

DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())

MONTHS = tuple(
    """January February March April May June July August September October November
    December""".split()
)

SEASONS = ("spring", "summer", "autumn", "winter")

CITIES = tuple(
    """Paris London Rome Berlin Madrid Lisbon Vienna Oslo Cairo Tokyo Lima Boston Dublin Prague
    Athens Seattle Chicago Sydney Toronto Delhi""".split()
)

ACTIVITIES = tuple(
    """reading singing dancing swimming painting cooking running climbing drawing fishing skating
    sailing hiking writing knitting sewing gardening""".split()
)

ONSETS = "b br c ch d dr f fl g gr h j k l m n p pl qu r s sh st t th tr v w y z".split()
VOWELS = "a e i o u ai ee oo ou ia".split()
CODAS = ["", "", "", "", "l", "n", "r", "s", "m", "x", "ck", "nd", "th", "rt"]


def coin_word(rng: Random) -> str:
    """A made-up word of one to three syllables, so that copying isn't tied to known words."""
    num_syllables = rng.choice((1, 2, 2, 2, 3))
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(num_syllables))
    return "".join(syllables) + rng.choice(CODAS)


def pick_name(rng: Random) -> str:
    """A first name, one in twelve of them made up."""
    return coin_word(rng).capitalize() if rng.random() < 1 / 12 else rng.choice(NAMES)


def article(phrase: str) -> str:
    """`phrase` behind "a" or "an"."""
    return ("an " if phrase[0].lower() in "aeiou" and phrase[:3] != "uni" else "a ") + phrase


def located(place: str) -> str:
    """The preposition that goes with `place`."""
    if place in ON_PLACES:
        return "on"
    return "at" if place in AT_PLACES else "in"


def join_and(items: list[str]) -> str:
    """`items` as an English list."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def sentence(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]
