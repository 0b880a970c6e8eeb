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
