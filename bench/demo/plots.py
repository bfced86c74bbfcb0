"""The sentences that stories are made of: openings, plots step by step, fillers and endings.

Each plot is a sequence of steps, each step a choice of sentences; the fields in braces are those of
`story.Cast`. Every story names its friend, its item and the item's color somewhere.
"""

from __future__ import annotations

OPENINGS = (
    "Once upon a time, there was {a_trait_who} named {name} who lived {where}.",
    "Once upon a time, {a_who} named {name} lived {where}.",
    "Long ago, {a_trait_who} called {name} lived {where}.",
    "There once was {a_who} named {name}. {name} lived {where} and was very {trait}.",
    "{name} was {a_trait_who} who lived {where}.",
    "One day, {a_who} named {name} woke up early {there}. {name} was very {trait}.",
    "In a land far away, {a_trait_who} named {name} had a home {where}.",
)

LOST = (
    (
        "{name} had {a_item} and loved it very much.",
        "{His} favorite thing was {a_item}.",
        "Every night {he} slept beside {a_item}.",
    ),
    (
        "One morning the {item} was gone.",
        "But one day {he} could not find the {item} anywhere.",
        "Then a strong wind came and the {item} was lost.",
    ),
    (
        "{name} looked under the bed and behind the door, but it was not there.",
        "{He} looked everywhere {there} and began to cry.",
        "{He} asked everyone {there}, but nobody had seen it.",
    ),
    (
        "Then {a_friend} named {fname} came by and offered to help.",
        'A kind {friend} named {fname} heard {him} and said, "I will help you look."',
        '"Do not be sad," said {fname} the {friend}. "We will find it together."',
    ),
    (
        "Together they found the {item} under a tree.",
        "After a long search, {fname} saw something {color} in the grass. It was the {item}!",
        "They followed small marks on the ground, and there was the {item}.",
    ),
    (
        "{name} thanked {fname} and shared some {food} with {fname}.",
        '"Thank you, {fname}!" said {name}, and they ate {food} together.',
    ),
)

FRIEND = (
    (
        "{name} had no friends and often felt alone.",
        "{He} wanted a friend more than anything.",
        "There was nobody to play with {there}.",
    ),
    (
        "One day {he} met {a_friend} named {fname}.",
        "Then {a_friend} called {fname} came to visit.",
        "One evening {fname} the {friend} knocked at the door.",
    ),
    (
        "At first, {name} was too shy to say hello.",
        "{fname} was carrying {a_item} and looked tired.",
        '"May I sit with you?" asked {fname}.',
    ),
    (
        "{name} offered {fname} some {food}.",
        '"Would you like some {food}?" asked {name}.',
        "{name} smiled and gave {fname} a plate of {food}.",
    ),
    (
        "{fname} was so happy that {name} got {a_item} as a gift.",
        "They played with {a_item} until the sun went down.",
        "{fname} showed {him} {a_item}, and they both laughed.",
    ),
    (
        "The next day they met again, and the day after that too.",
        "Soon everyone {there} knew the two friends.",
    ),
)

TREASURE = (
    (
        "One day {name} found an old map.",
        "One night {he} dreamed about a treasure.",
        "An old letter said that there was a treasure {there}.",
    ),
    (
        "{He} asked {a_friend} named {fname} to come along.",
        "{fname} the {friend} wanted to come too.",
        '"Let us go together," said {fname} the {friend}.',
    ),
    (
        "They walked all day and crossed a deep river.",
        "The way was long and dark, but they were not afraid.",
        "They climbed a high hill and looked around.",
    ),
    (
        "Under a big stone they found {a_item}.",
        "At the end of the path there was a box, and inside was {a_item}.",
        "Behind an old door they saw {a_item}.",
    ),
    (
        '"It is the most beautiful {item} I have ever seen," said {name}.',
        "The {item} was shining like the sun.",
        "{fname} wanted to keep the {item}, but {name} said they should share it.",
    ),
    (
        "They took the {item} home and ate {food} to celebrate.",
        "They carried it back and told everyone what had happened.",
    ),
)

STORM = (
    (
        "One night a great storm came.",
        "One winter the snow was very deep.",
        "One day it rained and rained and did not stop.",
    ),
    (
        "The wind blew so hard that the windows shook.",
        "{name} was afraid, but {he} tried to be brave.",
        "Water came in under the door, and everything was wet.",
    ),
    (
        "Then {he} heard a voice outside. It was {a_friend} named {fname}.",
        "Somebody called for help. It was {fname} the {friend}.",
    ),
    (
        "{name} took {a_item} and ran out to help.",
        "{He} used {a_item} to pull {fname} out of the mud.",
        "With {a_item} in {his} hand, {he} went out into the dark.",
    ),
    (
        "Soon they were both warm and dry by the fire, eating {food}.",
        "{name} made hot {food} for {fname}, and they waited for the morning.",
    ),
    (
        "When the sun came out, they were the best of friends.",
        "In the morning the sky was blue again.",
    ),
)

MAKING = (
    (
        "{name} wanted to make something new.",
        "{He} had a big idea one morning.",
        "There was going to be a party {there}.",
    ),
    (
        '"I will make {a_item}," {he} said.',
        "{He} decided to make {a_item} for {his} friend {fname}.",
        "{He} wanted to build {a_item} with {his} own hands.",
    ),
    (
        "{fname} the {friend} laughed and said it was too hard.",
        "{fname}, {a_friend}, came to watch and to ask questions.",
        "{His} neighbor {fname}, {a_friend}, brought some {food} and stayed to help.",
    ),
    (
        "The first try fell apart, and the second one too.",
        "{He} worked for three days and three nights.",
        "It was not easy, but {name} did not give up.",
    ),
    (
        "At last the {item} was done, and it was as {color} as could be.",
        "In the end the {color} {item} was perfect.",
    ),
    (
        '"How wonderful!" said {fname}, and everyone clapped.',
        "{fname} was amazed and wanted to learn how to do it.",
    ),
)

CONTEST = (
    (
        "Every year there was a big race {there}.",
        "One summer there was a contest {there}, and the prize was {a_item}.",
    ),
    (
        "{name} wanted to win, but {fname} the {friend} was very fast.",
        "Everyone thought that {fname} the {friend} would win.",
    ),
    (
        "{He} practiced every morning and ate a lot of {food}.",
        '"I will do my best," said {name}.',
    ),
    (
        "On the big day, {fname} slipped and fell down.",
        "Half way to the end, {fname} got lost.",
    ),
    (
        "{name} stopped and helped {fname} instead of running on.",
        "{name} could have won, but {he} went back to help {fname}.",
    ),
    (
        "Nobody won that day, but {name} was given {a_item} for being so kind.",
        "They reached the end together and shared the prize, {a_item}.",
    ),
)

SECRET = (
    (
        "One night {name} heard a strange sound.",
        "One evening {he} saw a light that had never been there before.",
        "Every night at midnight, somebody was singing {there}.",
    ),
    (
        "{He} followed it down a long path.",
        "{name} took a lamp and went to look.",
        '"Who is there?" {he} asked, but nobody answered.',
    ),
    (
        "It was only {fname}, {a_friend}, with {a_item}.",
        "Behind the wall sat {a_friend} named {fname}, holding {a_item}.",
        "There stood {fname} the {friend} next to {a_item}.",
    ),
    (
        '"Please do not tell anyone," said {fname}. "The {item} is magic."',
        '"This {item} can make a wish come true," said {fname}.',
        "{fname} had kept the {item} as a secret for many years.",
    ),
    (
        "{name} wished for {food} for everyone, and there it was.",
        "{name} promised to keep the secret, and {fname} gave {him} some {food}.",
    ),
)

PLOTS = (LOST, FRIEND, TREASURE, STORM, MAKING, CONTEST, SECRET)

FILLERS = (
    "The sun was warm and the birds were singing.",
    "It was a quiet day {there}.",
    "{name} loved to eat {food}.",
    "{His} heart was beating fast.",
    "Nobody knew what would happen next.",
    "The moon was big and round.",
    "{name} took a deep breath.",
    "It smelled of fresh {food}.",
)

ENDINGS = (
    "From that day on, {name} the {who} was never lonely {there} again.",
    "And {name} and {fname} lived happily ever after {there}.",
    "That night, the {who} slept well {there}.",
    "{name} learned that it is good to be kind. The end.",
    "And that is how the {who} and the {friend} became friends for life.",
    "The {who} went home and told everyone {there} about it. The end.",
    '"What a day!" said the {who}, and smiled.',
    "Ever since, people tell the story of the {who} {there}.",
    "And from then on, they shared everything, even the {color} {item}.",
    "The end.",
)
