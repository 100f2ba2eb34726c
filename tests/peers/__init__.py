"""Other kernel libraries' tests on gradscope's recipes, through a shim. Their files are fetched, never kept here."""
