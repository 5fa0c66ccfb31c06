"""What results are shown with: Markdown tables, the style of plots."""
