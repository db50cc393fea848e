"""python -m bench"""

from .run import main

main()
