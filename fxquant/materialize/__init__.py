"""Load time: recipes, their order and peak, and what runs them."""
