"""Common English words, by their part in a sentence."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = listed("""
    Ada Agnes Albert Alice Amir Anna Arthur Astrid Basil Beatrice Bella Boris Bruno Carla Carlos Cecil
    Clara Conrad Cora Dalia Daniel Dario Delia Edgar Edith Elena Elias Elsa Emil Esther Felix Fiona
    Flora Frida Gustav Hanna Harold Hazel Hector Helen Hugo Ida Igor Ines Irene Isaac Ivan Jasper Joan
    Jonas Julia Karim Karl Kira Laura Leo Leonard Lilian Linus Lucia Magnus Mara Marcus Maria Martin
    Mila Milo Miriam Nadia Nils Nina Nora Olga Oscar Otto Paula Pedro Petra Philip Quentin Rafael Ravi
    Rita Robert Rosa Ruben Ruth Samuel Sara Selma Simon Sofia Stella Sven Tamara Theo Tobias Ulla Ursula
    Vera Victor Viola Walter Yara
""")
PLACES = listed("""
    airport archive attic avenue bakery bank barn basement beach bridge cabin cafe canal castle cellar
    chapel church cinema clinic coast college corner cottage courtyard desert dock factory farm field
    forest garage garden gate hall harbour hill hospital hotel island kitchen lake library lighthouse
    lobby market meadow mill mountain museum office orchard palace park path pier plain port quarry
    river road school shore square stable stadium station street studio temple theatre tower town tunnel
    valley village vineyard workshop
""")
THINGS = listed("""
    apple armchair bag ball barrel basket bell belt bench bicycle blanket boat bone book boot bottle
    bowl box bread brick broom brush bucket button cake camera candle card carpet chain chair clock
    cloth coat coin comb compass crate crown cup curtain desk dish door dress drum engine envelope fan
    feather fence flag flower flute fork frame glass glove guitar hammer hat helmet hook horn jacket jar
    kettle key knife ladder lamp leaf lens letter lock map mask mat medal mirror mug nail necklace
    needle net newspaper notebook oven paint pan paper pen pencil piano picture pillow pipe plate pot
    purse radio ring robe rope ruler saddle sail scarf scissors shelf shell shield shirt shoe shovel
    soap spoon stamp stone stool stove suitcase sword table tent ticket torch towel toy tray trumpet
    umbrella vase violin wagon wallet watch wheel whistle
""")
QUALITIES = listed("""
    ancient bent big black blue brass bright broken brown cheap clean cold copper crooked dark deep
    dirty dry dusty empty faded famous fine flat foreign fragile fresh golden green grey heavy hidden
    high hollow huge iron large late light little lonely long loud low narrow new noisy old open orange
    painted pale plain polished pretty purple quick quiet rare red rough round rusty shallow sharp short
    silent silver simple slow small smooth soft solid square steep strange strong tall thick thin tiny
    warm weak wet white wide wild wooden worn yellow young
""")
ACTIONS = listed("""
    admired borrowed bought brought carried caught chose cleaned collected counted covered described
    drew dropped examined fetched filled finished fixed followed found gave guarded held hid kept left
    lifted liked lost made measured mentioned missed moved needed noticed offered opened ordered packed
    painted passed picked placed pulled pushed raised reached received recognised remembered repaired
    returned sent shared showed sold stored studied threw took touched traded used visited wanted washed
    watched weighed wrapped
""")
TIMES = listed("""
    afterwards again already always before breakfast daily early eventually finally later lately often
    once quietly rarely recently seldom slowly sometimes soon suddenly today together twice usually
    yesterday
""")
CITIES = listed("""
    Amsterdam Ankara Athens Bangkok Barcelona Berlin Bogota Boston Brussels Budapest Cairo Chicago
    Copenhagen Dallas Delhi Denver Dublin Geneva Hamburg Havana Helsinki Istanbul Jakarta Lagos Lima
    Lisbon London Madrid Manila Marseille Miami Milan Montreal Moscow Munich Nairobi Naples Osaka Oslo
    Paris Prague Quito Riga Rome Santiago Seattle Seoul Sofia Stockholm Sydney Tallinn Tokyo Toronto
    Tunis Vienna Warsaw Zagreb Zurich
""")
SURNAMES = listed("""
    Adler Baker Bauer Brandt Carver Cole Costa Dalton Duarte Ellis Fischer Fontaine Garcia Graham
    Hansen Hayes Hoffman Ibsen Jansen Keller Kovacs Lambert Larsen Lindgren Lopez Marchetti Mason
    Meyer Moreau Nakamura Nowak Okafor Olsen Ortega Palmer Petrov Quinn Ramos Reyes Rossi Santos
    Schmidt Silva Sorensen Tanaka Torres Varga Vogel Walker Weber Winter Young
""")
