"""Programs that show how hybridrec is used. They import public names only."""
