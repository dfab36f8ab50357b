// Keeps the end of a scrolled view in sight while its content grows or the view shrinks. A reader who scrolls up is left
// there until they are back at the end.

// CSS pixels above the end that count as back at the end.
const NEAR_END = 48;

export class EndFollower {
  constructor(view) {
    this.view = view;
    // The scroll position when it was last looked at: less than that is up.
    this.top = 0;
  }

  start() {
    this.view.addEventListener("scroll", () => this.notice());
    // Observers run after layout and before paint, whatever changed the sizes.
    const observer = new ResizeObserver(() => {
      this.notice();
      if (this.following) {
        this.toEnd();
      }
    });
    [this.view, ...this.view.children].forEach((one) => observer.observe(one));
    this.follow();
  }

  // Goes to the end, wherever the reader is, and follows it from now on.
  follow() {
    this.setFollowing(true);
    this.toEnd();
  }

  // Leaves the view where it is until the reader is back at the end.
  release() {
    this.setFollowing(false);
  }

  get following() {
    return this.view.classList.contains("following");
  }

  // The style turns scroll anchoring off meanwhile: it would look like a reader who scrolls up.
  setFollowing(on) {
    this.view.classList.toggle("following", on);
  }

  toEnd() {
    this.view.scrollTop = this.view.scrollHeight;
    this.top = this.view.scrollTop;
  }

  notice() {
    const { scrollTop, scrollHeight, clientHeight } = this.view;
    const below = scrollHeight - scrollTop - clientHeight;
    if (scrollTop < this.top) {
      // Content that became shorter moves the view up, too, but leaves it at the end. Positions may be fractions.
      this.setFollowing(below < 2);
    } else if (scrollTop > this.top && below < NEAR_END) {
      this.setFollowing(true);
    }
    this.top = scrollTop;
  }
}
